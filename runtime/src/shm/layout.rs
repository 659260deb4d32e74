//! Where everything lies in the shared memory of a run. Launcher and ranks compute it from the job, each for itself.

use super::asked::ASKS;
use crate::executor::peer;
use crate::target::Target;
use ir::op::DType;
use ir::program::{Action, Channel, Job};
use std::collections::BTreeMap;

/// A cache line; everything begins at one.
pub const LINE: u64 = 64;
/// Most bytes that a member of a group stages at a time: small enough for the second-level cache, large enough that
/// waiting for each other costs little.
pub const CHUNK: u64 = 256 << 10;

/// Bytes of the area for the end of a run: a flag, the rank, the length of the reason, the reason.
pub const REASON: u64 = 4096;

/// Where a group's members meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupArea {
    offset: u64,
    /// Bytes of a slot's data.
    pub chunk: u64,
}

impl GroupArea {
    fn member(self, k: usize) -> u64 {
        self.offset + k as u64 * (2 * LINE + 2 * (LINE + self.chunk))
    }

    /// Counts the chunks that member `k` has posted.
    pub fn posted(self, k: usize) -> u64 {
        self.member(k)
    }

    /// Counts likewise the chunks of which member `k` has summed its part, if each sums one: before anything else of
    /// the next chunk.
    pub fn summed(self, k: usize) -> u64 {
        self.member(k) + LINE / 2
    }

    /// Counts the chunks of all members that member `k` has taken.
    pub fn taken(self, k: usize) -> u64 {
        self.member(k) + LINE
    }

    /// Terms, then from the next line on the data, of the chunk with this number.
    pub fn slot(self, k: usize, chunk: u32) -> u64 {
        self.member(k) + 2 * LINE + u64::from(chunk % 2) * (LINE + self.chunk)
    }

    fn bytes(chunk: u64, members: usize) -> u64 {
        members as u64 * (2 * LINE + 2 * (LINE + chunk))
    }
}

/// A ring of messages from one rank to another on one channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MailArea {
    offset: u64,
    /// Lines of the ring; a message takes one and those of its data.
    pub lines: u32,
}

impl MailArea {
    /// Counts the lines written.
    pub fn head(self) -> u64 {
        self.offset
    }

    /// Counts the lines read.
    pub fn tail(self) -> u64 {
        self.offset + LINE
    }

    pub fn line(self, number: u32) -> u64 {
        self.offset + 2 * LINE + u64::from(number % self.lines) * LINE
    }
}

/// The area of one rank: how far it is, and for whom it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusArea {
    offset: u64,
}

impl StatusArea {
    /// Counts whatever happens.
    pub fn progress(self) -> u64 {
        self.offset
    }

    pub fn step(self) -> u64 {
        self.offset + 8
    }

    /// Phase, call, command.
    pub fn position(self, k: u64) -> u64 {
        self.offset + 16 + 4 * k
    }

    /// Offset of a word that is not 0 while the rank waits.
    pub fn waiting(self) -> u64 {
        self.offset + 28
    }

    /// Counts what it may wait for.
    pub fn doorbell(self) -> u64 {
        self.offset + 32
    }

    /// The latest step that it has begun.
    pub fn begun(self) -> u64 {
        self.offset + 40
    }

    /// For each rank, not 0 while it waits for that one.
    pub fn waits(self, rank: u64) -> u64 {
        self.offset + 48 + rank
    }
}

/// What one rank has in the segment: its slots in groups, and the rings of what it sends.
struct SegmentShare {
    /// Members of a group and the largest chunk of one of them.
    groups: BTreeMap<Vec<u64>, u64>,
    /// Lines of the largest message.
    mail: BTreeMap<(u64, u64, Channel), u64>,
}

impl SegmentShare {
    fn of(job: &Job, target: &Target, rank: u64) -> SegmentShare {
        let width = |dtype: DType| match target {
            Target::Cpu(_) | Target::Gpu { .. } => dtype.bytes(),
            Target::Reference => 8,
        };
        let mut groups: BTreeMap<Vec<u64>, u64> = BTreeMap::new();
        let mut mail: BTreeMap<(u64, u64, Channel), u64> = BTreeMap::new();
        let program = &job.programs[job.stages[job.mesh.stage(rank) as usize].program as usize];
        let members: Vec<Vec<u64>> = program.groups.iter().map(|g| g.members(&job.mesh, rank)).collect();
        for command in program.bodies.iter().flat_map(|b| &b.commands) {
            match &command.action {
                Action::Collective { kind, group, dtype, count, .. } => {
                    let members = &members[group.index()];
                    let (parts, _) = kind.parts(members.len() as u64);
                    // Every part of a chunk begins at a cache line.
                    let bytes = (count * width(*dtype)).next_multiple_of(LINE).min(CHUNK.max(parts * LINE) / parts) / LINE * LINE * parts;
                    let most = groups.entry(members.clone()).or_insert(LINE);
                    *most = bytes.max(*most);
                }
                Action::Send { hops, channel, dtype, count, .. } => {
                    let most = mail.entry((rank, peer(job, rank, *hops), *channel)).or_insert(0);
                    *most = (count * width(*dtype)).div_ceil(LINE).max(*most);
                }
                Action::Launch { .. }
                | Action::Copy { .. }
                | Action::Fill { .. }
                | Action::Load { .. }
                | Action::Recv { .. }
                | Action::Report { .. }
                | Action::Limit { .. }
                | Action::Record { .. }
                | Action::Wait { .. } => {}
            }
        }
        SegmentShare { groups, mail }
    }
}

/// Lines of the ring for messages of at most so many: as many of the largest as are guaranteed, and one more so that
/// sending overlaps with receiving.
fn ring(job: &Job, lines: u64) -> u64 {
    (1 + lines) * (u64::from(job.in_flight) + 1)
}

/// Bytes of shared memory that are there for one rank: how it is, its slots in groups, the rings of what it sends.
/// All ranks' together, the end of the run and what the launcher says are [`SegmentLayout::bytes`]. Members of a
/// group run the same collectives, so one rank knows its slots.
pub fn bytes_of_rank(job: &Job, target: &Target, rank: u64) -> u64 {
    let share = SegmentShare::of(job, target, rank);
    let slots: u64 = share.groups.values().map(|chunk| GroupArea::bytes(*chunk, 1)).sum();
    let rings: u64 = share.mail.values().map(|lines| (2 + ring(job, *lines)) * LINE).sum();
    status_bytes(job.mesh.world()) + slots + rings
}

/// Offsets in the segment of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct SegmentLayout {
    /// Ranks of the job, on all machines together.
    pub world: u64,
    /// Where the area begins that says whether the run has ended, and why.
    pub end: u64,
    /// What ranks are asked to do, and after which step: a word each.
    pub asked: u64,
    status: u64,
    groups: BTreeMap<Vec<u64>, GroupArea>,
    mail: BTreeMap<(u64, u64, Channel), MailArea>,
    /// Bytes of the whole segment.
    pub bytes: u64,
}

impl SegmentLayout {
    /// `first` bytes at the start are for the launcher. The job has been checked.
    pub fn new(job: &Job, target: &Target, first: u64) -> SegmentLayout {
        let world = job.mesh.world();
        let mut groups: BTreeMap<Vec<u64>, u64> = BTreeMap::new();
        let mut mail: BTreeMap<(u64, u64, Channel), u64> = BTreeMap::new();
        for rank in 0..world {
            let own = SegmentShare::of(job, target, rank);
            for (members, chunk) in own.groups {
                let most = groups.entry(members).or_insert(chunk);
                *most = chunk.max(*most);
            }
            mail.extend(own.mail);
        }
        let end = first.next_multiple_of(LINE);
        let asked = end + REASON;
        let status = asked + (8 * ASKS as u64).next_multiple_of(LINE);
        let mut next = status + world * status_bytes(world);
        let groups = groups
            .into_iter()
            .map(|(members, chunk)| {
                let area = GroupArea { offset: next, chunk };
                next += GroupArea::bytes(chunk, members.len());
                (members, area)
            })
            .collect();
        let mail = mail
            .into_iter()
            .map(|(route, lines)| {
                let lines = ring(job, lines);
                let area = MailArea { offset: next, lines: u32::try_from(lines).expect("invariant: checked sizes are below 2^32 lines") };
                next += 2 * LINE + lines * LINE;
                (route, area)
            })
            .collect();
        SegmentLayout { world, end, asked, status, groups, mail, bytes: next }
    }

    /// Where a rank says how far it is, and for whom it waits.
    pub fn status(&self, rank: u64) -> StatusArea {
        StatusArea { offset: self.status + rank * status_bytes(self.world) }
    }

    /// Members of all groups, in an order that is the same on all ranks.
    pub fn groups(&self) -> impl Iterator<Item = &Vec<u64>> {
        self.groups.keys()
    }

    /// The channels of all messages.
    pub fn channels(&self) -> impl Iterator<Item = Channel> {
        self.mail.keys().map(|(_, _, channel)| *channel)
    }

    /// Where these members meet, given in rank order; none if they are no group of the job.
    pub fn group(&self, members: &[u64]) -> Option<GroupArea> {
        self.groups.get(members).copied()
    }

    /// The ring of one rank's messages to another on a channel; none if there are no such messages.
    pub fn mail(&self, from: u64, to: u64, channel: Channel) -> Option<MailArea> {
        self.mail.get(&(from, to, channel)).copied()
    }
}

fn status_bytes(world: u64) -> u64 {
    (48 + world).next_multiple_of(LINE)
}
