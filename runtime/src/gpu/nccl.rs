//! NCCL: what GPUs exchange without the host. The library is loaded when it is asked for, 2.18 or newer.
//!
//! Which communicators there are, and the order in which they are made, follows from the job alone ([`rounds`]): one for each group, and one for each
//! pair of ranks and channel, so that messages of one never wait for those of another. All start without blocking and within a time limit; errors that
//! come later are found while waiting, and end all communicators.

mod library;

use super::cuda::{Reserved, Stream};
use super::{Between, End};
use crate::comm::Terms;
use crate::executor::peer;
use cudarc::nccl::sys::{self, ncclDataType_t, ncclRedOp_t, ncclResult_t};
use ir::op::{DType, Reduce};
use ir::program::{Action, Channel, Collective, Job};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// The least version, as NCCL writes it: 2.18.0.
const LEAST: i32 = 21_800;
/// What marks a configuration as initialised, and a number in it as not given.
const MAGIC: u32 = 0xcafe_beef;
const UNDEFINED: i32 = i32::MIN;
/// A rank that takes part in making communicators, but is in none.
const NO_COLOR: i32 = -1;
/// How long until another look.
const AGAIN: Duration = Duration::from_micros(100);

/// Whether NCCL can be used. Nothing of it may be called before this has said so.
///
/// # Errors
/// Why not.
pub fn probe() -> Result<(), String> {
    library::find()
}

fn recent(version: i32) -> Result<(), String> {
    if version >= LEAST {
        return Ok(());
    }
    // Before 2.9 there were two digits less.
    let (major, minor) = if version < 10_000 { (version / 1000, version % 1000 / 100) } else { (version / 10_000, version % 10_000 / 100) };
    Err(format!("NCCL {major}.{minor} is too old, mcc needs 2.18 or newer"))
}

/// What all ranks need to make their first communicator. The process that makes it, rank 0's launcher, must last until they have.
///
/// # Errors
/// What NCCL says.
pub fn unique_id() -> Result<Vec<u8>, String> {
    let mut id = sys::ncclUniqueId { internal: [0; 128] };
    // SAFETY: `id` is writable.
    check("ncclGetUniqueId", unsafe { library::ncclGetUniqueId(&mut id) })?;
    Ok(id.internal.iter().map(|b| *b as u8).collect())
}

/// What a call came to; one that goes on is no error.
fn check(what: &str, result: ncclResult_t) -> Result<(), String> {
    match result {
        ncclResult_t::ncclSuccess | ncclResult_t::ncclInProgress => Ok(()),
        other => {
            // SAFETY: the text is static.
            let text = unsafe { CStr::from_ptr(library::ncclGetErrorString(other)) };
            Err(format!("{what}: {}", text.to_string_lossy()))
        }
    }
}

/// Ranks that communicate apart from others: a group, or the two ends of a channel, the sender first.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Link {
    pub members: Vec<u64>,
    pub channel: Option<Channel>,
}

/// The links of a job, in rounds of which each has every rank at most once. All ranks compute the same.
pub fn rounds(job: &Job) -> Vec<Vec<Link>> {
    let mut links = BTreeSet::new();
    for rank in 0..job.mesh.world() {
        let program = &job.programs[job.stages[job.mesh.stage(rank) as usize].program as usize];
        for command in program.bodies.iter().flat_map(|b| &b.commands) {
            match &command.action {
                Action::Collective { group, .. } => {
                    let members = program.groups[group.index()].members(&job.mesh, rank);
                    links.insert(Link { members, channel: None });
                }
                Action::Send { hops, channel, .. } => {
                    let members = vec![rank, peer(job, rank, *hops)];
                    links.insert(Link { members, channel: Some(*channel) });
                }
                Action::Launch { .. }
                | Action::Copy { .. }
                | Action::Recv { .. }
                | Action::Fill { .. }
                | Action::Load { .. }
                | Action::Report { .. }
                | Action::Limit { .. }
                | Action::Record { .. }
                | Action::Wait { .. } => {}
            }
        }
    }
    let mut rounds: Vec<(BTreeSet<u64>, Vec<Link>)> = vec![];
    for link in links {
        let free = rounds.iter_mut().find(|(taken, _)| link.members.iter().all(|m| !taken.contains(m)));
        let round = match free {
            Some(round) => round,
            None => {
                rounds.push(Default::default());
                rounds.last_mut().expect("invariant: it was just pushed")
            }
        };
        round.0.extend(&link.members);
        round.1.push(link);
    }
    rounds.into_iter().map(|r| r.1).collect()
}

/// A communicator, owned.
struct Comm(sys::ncclComm_t);

// SAFETY: a handle that one thread at a time uses.
unsafe impl Send for Comm {}

impl Drop for Comm {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: it is owned; aborting frees it whether or not something is under way.
            let _ = unsafe { library::ncclCommAbort(self.0) };
        }
    }
}

impl Comm {
    /// Waits until what was begun is through.
    fn settle(&self, what: &str, deadline: Instant) -> Result<(), String> {
        loop {
            let mut state = ncclResult_t::ncclSuccess;
            // SAFETY: the communicator exists, `state` is writable.
            check(what, unsafe { library::ncclCommGetAsyncError(self.0, &mut state) })?;
            match state {
                ncclResult_t::ncclInProgress if Instant::now() < deadline => std::thread::sleep(AGAIN),
                ncclResult_t::ncclInProgress => return Err(format!("{what} took too long: is another rank gone?")),
                other => return check(what, other),
            }
        }
    }
}

impl Comm {
    /// Passes a byte from the sender of a channel to its receiver.
    fn connect(&self, sends: bool, byte: u64, stream: &Stream) -> Result<(), String> {
        let (ty, on) = (ncclDataType_t::ncclUint8, stream.0.cast());
        // SAFETY: the communicator, the stream and the memory are alive until the stream has been waited for.
        unsafe {
            if sends {
                check("ncclSend", library::ncclSend(byte as *const c_void, 1, ty, 1, self.0, on))
            } else {
                check("ncclRecv", library::ncclRecv(byte as *mut c_void, 1, ty, 0, self.0, on))
            }
        }
    }
}

/// A configuration of NCCL 2.18, whose fields the bindings have: newer versions take what they know beyond them from their defaults.
fn configuration() -> sys::ncclConfig_t {
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: MAGIC,
        version: LEAST as u32,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: null_mut(),
        splitShare: UNDEFINED,
    }
}

/// All communicators of a rank.
pub struct Nccl {
    rank: u64,
    links: BTreeMap<Link, Comm>,
    limit: Duration,
    // Last: the others were made from it.
    world: Comm,
}

impl Nccl {
    /// Makes the communicators of a rank; all ranks do, at the same time. The GPU's context is current, its stream does nothing else.
    ///
    /// The ends of channels are connected by a byte each, as NCCL connects two ranks when both come to what they exchange first: here they do so in one order,
    /// while in a program one may wait for the other's send.
    ///
    /// # Errors
    /// What NCCL says, or if others do not take part within the time.
    pub(super) fn new(job: &Job, rank: u64, id: &[u8], limit: Duration, stream: &Stream) -> Result<Nccl, String> {
        let mut unique = sys::ncclUniqueId { internal: [0; 128] };
        if id.len() != unique.internal.len() {
            return Err(format!("an id of {} bytes", id.len()));
        }
        unique.internal.iter_mut().zip(id).for_each(|(to, from)| *to = *from as _);
        let deadline = Instant::now() + limit;
        let (mut config, mut world) = (configuration(), Comm(null_mut()));
        let count = job.mesh.world() as i32;
        // SAFETY: all arguments live during the call.
        check("ncclCommInitRankConfig", unsafe { library::ncclCommInitRankConfig(&mut world.0, count, unique, rank as i32, &mut config) })?;
        world.settle("ncclCommInitRankConfig", deadline)?;
        let byte = Reserved::new(1)?;
        let mut links = BTreeMap::new();
        for round in rounds(job) {
            let own = round.into_iter().find(|l| l.members.contains(&rank));
            let color = own.as_ref().map_or(NO_COLOR, |l| l.members[0] as i32);
            let key = own.as_ref().and_then(|l| l.members.iter().position(|m| *m == rank)).unwrap_or(0) as i32;
            let mut config = configuration();
            // Written when the split is through, by a thread of NCCL's; so if it fails, the place is left to that.
            let place = Box::into_raw(Box::new(null_mut()));
            // SAFETY: as above.
            check("ncclCommSplit", unsafe { library::ncclCommSplit(world.0, color, key, place, &mut config) })?;
            world.settle("ncclCommSplit", deadline)?;
            // SAFETY: it came from a box, and NCCL is through with it.
            let comm = Comm(*unsafe { Box::from_raw(place) });
            if let Some(link) = own {
                comm.settle("ncclCommSplit", deadline)?;
                if link.channel.is_some() {
                    comm.connect(link.members[0] == rank, byte.start(), stream)?;
                    comm.settle("the first message", deadline)?;
                }
                links.insert(link, comm);
            }
        }
        let nccl = Nccl { rank, links, limit, world };
        while !stream.is_idle()? {
            nccl.look()?;
            if Instant::now() > deadline {
                return Err("the first messages took too long: is another rank gone?".into());
            }
            std::thread::sleep(AGAIN);
        }
        Ok(nccl)
    }

    /// Looks for errors that came since a call returned.
    ///
    /// # Errors
    /// What NCCL says.
    pub fn look(&self) -> Result<(), String> {
        for comm in self.links.values().chain([&self.world]) {
            let mut state = ncclResult_t::ncclSuccess;
            // SAFETY: the communicator exists, `state` is writable.
            check("NCCL", unsafe { library::ncclCommGetAsyncError(comm.0, &mut state) })?;
            check("NCCL, later on", state)?;
        }
        Ok(())
    }

    /// Ends all communicators in order, once nothing is under way.
    ///
    /// # Errors
    /// What NCCL says.
    pub fn finish(mut self) -> Result<(), String> {
        let deadline = Instant::now() + self.limit;
        let mut end = |comm: &mut Comm| {
            // SAFETY: the communicator exists; once destroyed, it is not touched again.
            unsafe {
                check("ncclCommFinalize", library::ncclCommFinalize(comm.0))?;
                comm.settle("ncclCommFinalize", deadline)?;
                check("ncclCommDestroy", library::ncclCommDestroy(std::mem::replace(&mut comm.0, null_mut())))
            }
        };
        self.links.values_mut().try_for_each(&mut end)?;
        end(&mut self.world)
    }

    fn link(&self, link: Link) -> Result<&Comm, String> {
        self.links.get(&link).ok_or_else(|| format!("no communicator of ranks {:?}", link.members))
    }

    /// Issues an exchange on a stream.
    ///
    /// # Errors
    /// What NCCL says.
    pub(super) fn issue(&self, between: &Between, stream: &Stream) -> Result<(), String> {
        let (name, comm, result) = match between {
            Between::Collective { members, terms, from, to } => {
                let comm = self.link(Link { members: members.clone(), channel: None })?;
                (terms.kind.name(), comm, self.collective(comm, members, terms, [*from, *to], stream)?)
            }
            Between::Message { end, channel, dtype, count, address } => {
                let members = match end {
                    End::SendTo(to) => vec![self.rank, *to],
                    End::ReceiveFrom(from) => vec![*from, self.rank],
                };
                let comm = self.link(Link { members, channel: Some(*channel) })?;
                let (ty, count, on) = (data_type(*dtype), *count as usize, stream.0.cast());
                // SAFETY: as in `collective`; the sender is the communicator's member 0.
                let result = unsafe {
                    match end {
                        End::SendTo(_) => library::ncclSend(*address as *const c_void, count, ty, 1, comm.0, on),
                        End::ReceiveFrom(_) => library::ncclRecv(*address as *mut c_void, count, ty, 0, comm.0, on),
                    }
                };
                ("message", comm, result)
            }
        };
        check(name, result)?;
        comm.settle(name, Instant::now() + self.limit)
    }

    fn collective(&self, comm: &Comm, members: &[u64], terms: &Terms, [src, dst]: [u64; 2], stream: &Stream) -> Result<ncclResult_t, String> {
        let (ty, count, stream) = (data_type(terms.dtype), terms.count as usize, stream.0.cast());
        let (from, to) = (src as *const c_void, dst as *mut c_void);
        // SAFETY: places lie within their arenas; the communicator and the stream are alive. What is issued between the start and the end of a group
        // happens at once.
        unsafe {
            Ok(match terms.kind {
                Collective::AllReduce(reduce) => library::ncclAllReduce(from, to, count, ty, operation(reduce), comm.0, stream),
                Collective::AllGather => library::ncclAllGather(from, to, count, ty, comm.0, stream),
                Collective::ReduceScatter(reduce) => library::ncclReduceScatter(from, to, count, ty, operation(reduce), comm.0, stream),
                Collective::AllToAll | Collective::Shift => {
                    check("ncclGroupStart", library::ncclGroupStart())?;
                    let issued = parts(members, self.rank, terms).into_iter().try_for_each(|(other, part)| {
                        let at = part.offset;
                        if part.gives {
                            check("ncclSend", library::ncclSend((src + at) as *const c_void, count, ty, other, comm.0, stream))?;
                        }
                        if part.gets {
                            check("ncclRecv", library::ncclRecv((dst + at) as *mut c_void, count, ty, other, comm.0, stream))?;
                        }
                        Ok::<(), String>(())
                    });
                    let ended = library::ncclGroupEnd();
                    issued?;
                    ended
                }
            })
        }
    }
}

/// What passes between this rank and another member: whether it gives or gets, and how many bytes on from the start of both ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    gives: bool,
    gets: bool,
    offset: u64,
}

/// By member, what an exchange of all with all, or a shift to the next member, is to a rank.
fn parts(members: &[u64], rank: u64, terms: &Terms) -> Vec<(i32, Part)> {
    let n = members.len();
    let me = members.iter().position(|m| *m == rank).unwrap_or(0);
    let part = |k: usize| match terms.kind {
        Collective::Shift => Part { gives: k == (me + 1) % n, gets: (k + 1) % n == me, offset: 0 },
        Collective::AllToAll | Collective::AllReduce(_) | Collective::AllGather | Collective::ReduceScatter(_) => {
            Part { gives: true, gets: true, offset: k as u64 * terms.count * terms.dtype.bytes() }
        }
    };
    (0..n).map(|k| (k as i32, part(k))).filter(|(_, p)| p.gives || p.gets).collect()
}

fn data_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::Bf16 => ncclDataType_t::ncclBfloat16,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::Bool => ncclDataType_t::ncclUint8,
    }
}

fn operation(reduce: Reduce) -> ncclRedOp_t {
    match reduce {
        Reduce::Sum => ncclRedOp_t::ncclSum,
        // Bools are bytes of 0 and 1.
        Reduce::Max | Reduce::Any => ncclRedOp_t::ncclMax,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{self, Split};

    #[test]
    fn every_link_of_every_rank_is_in_one_round_and_no_rank_twice() {
        let job = fixture::job(&Split { microbatches: 2, pp: 2, dp: 2, tp: 2 });
        let rounds = rounds(&job);
        let all: Vec<&Link> = rounds.iter().flatten().collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
        for round in &rounds {
            let ranks: Vec<u64> = round.iter().flat_map(|l| l.members.clone()).collect();
            assert_eq!(ranks.iter().collect::<BTreeSet<_>>().len(), ranks.len(), "{round:?}");
        }
        assert!(all.iter().any(|l| l.members == [0, 1] && l.channel.is_none()), "{all:?}");
        assert!(all.iter().any(|l| l.channel.is_some()), "{all:?}");
        // Ranks of a group all have it, so the rounds are as many as one rank has links, or few more.
        let most = (0..8).map(|r| all.iter().filter(|l| l.members.contains(&r)).count()).max().unwrap_or(0);
        assert!((most..=2 * most).contains(&rounds.len()), "{} rounds, {most} links", rounds.len());
    }

    #[test]
    fn a_shift_goes_to_the_next_member_and_comes_from_the_one_before() {
        let terms = |kind| Terms { kind, dtype: DType::F32, count: 3 };
        let part = |gives, gets, offset| Part { gives, gets, offset };
        assert_eq!(parts(&[1, 4, 7], 4, &terms(Collective::Shift)), [(0, part(false, true, 0)), (2, part(true, false, 0))]);
        assert_eq!(parts(&[1, 4], 1, &terms(Collective::Shift)), [(1, part(true, true, 0))]);
        assert_eq!(parts(&[1, 4], 1, &terms(Collective::AllToAll)), [(0, part(true, true, 0)), (1, part(true, true, 12))]);
    }

    #[test]
    fn old_versions_are_named() {
        assert_eq!(recent(21_800), Ok(()));
        assert_eq!(recent(23_004), Ok(()));
        assert_eq!(recent(21_706), Err("NCCL 2.17 is too old, mcc needs 2.18 or newer".into()));
        assert_eq!(recent(2_804), Err("NCCL 2.8 is too old, mcc needs 2.18 or newer".into()));
    }

    #[test]
    fn the_configuration_is_that_of_2_18() {
        assert_eq!(configuration().size, 48);
    }
}
