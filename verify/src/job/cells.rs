//! The bytes of a rank, cut where what commands touch begins or ends. Temporary buffers and stashes of a memory share
//! theirs: what lies in one place in different phases has the same cells.

use ir::program::{Arena, Program, Slots, Stash, Stream};
use std::ops::Range;

/// A set of streams, one bit each.
pub type Streams = u16;

/// Bytes `from..to` of an arena, or of one slot of a stash.
#[derive(Clone, Copy, Debug)]
pub struct Bytes {
    pub arena: Arena,
    pub from: u64,
    pub to: u64,
    pub writes: bool,
}

/// The cells that a command touches, as a range between two cuts of its arena or stash.
#[derive(Clone, Copy)]
pub struct CellAccess {
    pub home: usize,
    from: usize,
    to: usize,
    pub writes: bool,
}

/// An arena, or a stash: one or more slots in a memory, of which each microbatch uses one.
struct ArenaSlots {
    /// The arena whose memory it is.
    arena: Arena,
    /// Where each slot begins there.
    begins: Vec<u64>,
    /// Bytes of a slot at which something that a command touches begins or ends, ascending.
    cuts: Vec<u64>,
    /// For each slot, the cell at each cut.
    cells: Vec<Vec<usize>>,
}

impl ArenaSlots {
    fn new(arena: Arena, begins: Vec<u64>) -> ArenaSlots {
        ArenaSlots { arena, begins, cuts: vec![], cells: vec![] }
    }

    /// The number of the first cut at or behind a byte of a slot.
    fn cut(&self, byte: u64) -> usize {
        self.cuts.partition_point(|c| *c < byte)
    }
}

/// The cells of all arenas and stashes.
pub struct ArenaCells {
    /// Arenas, then stashes.
    list: Vec<ArenaSlots>,
    /// For each arena, the stashes that divide it: the end of each, and its number.
    stashes: [Vec<(u64, usize)>; Arena::ALL.len()],
}

impl ArenaCells {
    pub fn new(program: &Program, slots: &[Slots]) -> ArenaCells {
        let mut list: Vec<ArenaSlots> = Arena::ALL.map(|arena| ArenaSlots::new(arena, vec![0])).into();
        let mut stashes: [Vec<(u64, usize)>; Arena::ALL.len()] = Default::default();
        for (k, (Stash { space, bytes }, Slots { count, at })) in program.stashes.iter().zip(slots).enumerate() {
            let all = &mut stashes[space.stash() as usize];
            all.push((all.last().map_or(0, |last| last.0) + bytes, k));
            list.push(ArenaSlots::new(space.temporary(), (0..u64::from(*count)).map(|k| at + k * bytes).collect()));
        }
        ArenaCells { list, stashes }
    }

    /// The arena or stash of some bytes, and where they lie in a slot.
    fn find(&self, bytes: &Bytes) -> (usize, u64, u64) {
        if !bytes.arena.is_stash() {
            return (bytes.arena as usize, bytes.from, bytes.to);
        }
        let stashes = &self.stashes[bytes.arena as usize];
        let at = stashes.partition_point(|(end, _)| *end <= bytes.from);
        let (_, k) = stashes[at];
        let begin = if at == 0 { 0 } else { stashes[at - 1].0 };
        (Arena::ALL.len() + k, bytes.from - begin, bytes.to - begin)
    }

    pub fn touch(&self, bytes: &Bytes) -> CellAccess {
        let (home, from, to) = self.find(bytes);
        CellAccess { home, from: self.list[home].cut(from), to: self.list[home].cut(to), writes: bytes.writes }
    }

    /// Cuts what these commands touch into cells, and says which streams touch each. Bytes that one stream alone
    /// touches, or that nobody writes, cannot be raced for: they have no cell.
    pub fn divide<'t>(&mut self, commands: impl Iterator<Item = (Stream, &'t [Bytes])> + Clone) -> Vec<Streams> {
        for bytes in commands.clone().flat_map(|(_, bytes)| bytes) {
            let (home, from, to) = self.find(bytes);
            self.list[home].cuts.extend([from, to]);
        }
        for home in &mut self.list {
            home.cuts.sort_unstable();
            home.cuts.dedup();
        }
        let mut users: Vec<Vec<(Streams, bool)>> = self.list.iter().map(|home| vec![(0, false); home.cuts.len()]).collect();
        for (stream, bytes) in commands {
            for touch in bytes.iter().map(|b| self.touch(b)) {
                for (streams, written) in &mut users[touch.home][touch.from..touch.to] {
                    *streams |= 1 << stream as usize;
                    *written |= touch.writes;
                }
            }
        }
        let mut of_cells = vec![];
        for arena in Arena::ALL {
            let within = |(_, home): &(usize, &ArenaSlots)| home.arena == arena;
            let slots = || self.list.iter().enumerate().filter(within).flat_map(|(h, home)| home.begins.iter().map(move |begin| (h, home, begin)));
            let mut cuts: Vec<u64> = slots().flat_map(|(_, home, begin)| home.cuts.iter().map(move |c| begin + c)).collect();
            cuts.sort_unstable();
            cuts.dedup();
            let cut = |byte: u64| cuts.partition_point(|c| *c < byte);
            let mut all = vec![(0, false); cuts.len()];
            for (h, home, begin) in slots() {
                for (ends, (streams, written)) in home.cuts.windows(2).zip(&users[h]) {
                    for user in &mut all[cut(begin + ends[0])..cut(begin + ends[1])] {
                        *user = (user.0 | streams, user.1 | written);
                    }
                }
            }
            let mut cell_at: Vec<usize> = Vec::with_capacity(all.len());
            for (streams, written) in all {
                cell_at.push(of_cells.len());
                if written && Streams::count_ones(streams) > 1 {
                    of_cells.push(streams);
                }
            }
            for home in self.list.iter_mut().filter(|home| home.arena == arena) {
                let at = |begin: &u64| home.cuts.iter().map(|c| cell_at[cuts.partition_point(|x| x < &(begin + c))]).collect();
                home.cells = home.begins.iter().map(at).collect();
            }
        }
        of_cells
    }

    /// The number of slots of an arena or a stash.
    pub fn slots(&self, home: usize) -> usize {
        self.list[home].begins.len()
    }

    /// The cells of a touch by a call for a microbatch.
    pub fn cells(&self, touch: &CellAccess, microbatch: usize) -> Range<usize> {
        let slots = &self.list[touch.home].cells;
        let cells = &slots[microbatch % slots.len()];
        cells[touch.from]..cells[touch.to]
    }
}
