//! NCCL: what GPUs exchange without the host. The library is loaded when it is asked for, 2.18 or newer.
//!
//! Which communicators there are, and the order in which they are made, follows from the job alone ([`rounds`]): one
//! for each group, and that of all ranks, by which messages go. All start without blocking and within a time limit;
//! errors that come later are found while waiting, and end all communicators. Whoever issues exchanges does so one by
//! one, in the order that the job's check has shown to come to its end.

mod comm;
mod exchange;
mod library;
mod links;
mod memory;

use super::cuda::{Reserved, Stream};
use super::{CardExchange, CardMessage, Outgoing};
use crate::comm::Terms;
use comm::{AGAIN, Comm, check, configuration};
use cudarc::nccl::sys;
use ir::op::{Channel, Collective, DType};
use ir::program::Job;
use links::{LinkCollectives, NcclLink, rounds};
pub use memory::{MAX_CTAS, bytes_of_rank};
use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

/// Ranges of the first exchanges begin at multiples of so many bytes.
const ALIGN: u64 = 256;

/// A rank that takes part in making communicators, but is in none.
const NO_COLOR: i32 = -1;

/// Whether NCCL can be used. Nothing of it may be called before this has said so.
///
/// # Errors
/// Why not.
pub fn probe() -> Result<(), String> {
    library::find()
}

/// Bytes of what [`unique_id`] gives.
pub const ID: usize = 128;

/// What all ranks need to make their first communicator. The process that makes it, rank 0's launcher, must last
/// until they have.
///
/// # Errors
/// What NCCL says.
pub fn unique_id() -> Result<Vec<u8>, String> {
    let mut id = sys::ncclUniqueId { internal: [0; ID] };
    // SAFETY: `id` is writable.
    check("ncclGetUniqueId", unsafe { library::ncclGetUniqueId(&mut id) })?;
    Ok(id.internal.iter().map(|b| *b as u8).collect())
}

/// The id by which ranks meet, and how their communicators are made.
pub struct NcclSetup<'a> {
    /// What [`unique_id`] gave.
    pub id: &'a [u8],
    /// Most blocks of a kernel of NCCL's.
    pub max_ctas: u32,
}

/// All communicators of a rank.
pub struct Nccl {
    rank: u64,
    groups: BTreeMap<Vec<u64>, Comm>,
    limit: Duration,
    max_ctas: u32,
    /// Of all ranks, between which messages go. Last: the others were made from it.
    world: Comm,
}

impl Nccl {
    /// Makes the communicators of a rank; all ranks do, at the same time. The GPU's context is current, its stream
    /// does nothing else.
    ///
    /// NCCL connects ranks when they come to an exchange of a kind first, which takes memory and allows no capture.
    /// So each exchange of the job is made once here, of numbers that nobody needs, round by round: ranks come to
    /// them in one order.
    ///
    /// # Errors
    /// What NCCL says, or if others do not take part within the time.
    pub(super) fn new(job: &Job, rank: u64, setup: &NcclSetup<'_>, limit: Duration, stream: &Stream) -> Result<Nccl, String> {
        let NcclSetup { id, max_ctas } = *setup;
        let mut unique = sys::ncclUniqueId { internal: [0; 128] };
        if id.len() != unique.internal.len() {
            return Err(format!("an id of {} bytes", id.len()));
        }
        unique.internal.iter_mut().zip(id).for_each(|(to, from)| *to = *from as _);
        let deadline = Instant::now() + limit;
        let (mut config, mut world) = (configuration(max_ctas), Comm(null_mut()));
        let count = job.mesh.world() as i32;
        // SAFETY: all arguments live during the call.
        check("ncclCommInitRankConfig", unsafe { library::ncclCommInitRankConfig(&mut world.0, count, unique, rank as i32, &mut config) })?;
        world.settle("ncclCommInitRankConfig", deadline)?;
        let mut nccl = Nccl { rank, groups: BTreeMap::new(), limit, max_ctas, world };
        let rounds = rounds(job);
        for round in &rounds {
            if let Some(members) = nccl.split(round, deadline)? {
                nccl.groups.insert(members.0, members.1);
            }
        }
        let all = || rounds.iter().flatten().filter(|(link, _)| link.members().contains(&rank));
        let most = all().flat_map(|(link, collectives)| collectives.values().map(|t| room(t, link.members().len()))).max().unwrap_or(0);
        let room = Reserved::new(2 * most.max(ALIGN))?;
        let [from, to] = [room.start(), room.start() + most.max(ALIGN)];
        for (link, collectives) in all() {
            match link {
                NcclLink::Messages([sender, receiver]) => {
                    let message = CardMessage { channel: Channel(0), dtype: DType::Bool, count: 1, address: to };
                    let outgoing = Outgoing { to: *receiver, channel: Channel(0), slot: 0, dtype: DType::Bool, count: 1 };
                    if *sender == rank {
                        nccl.issue(None, &[outgoing], &[from], stream)?;
                    } else {
                        nccl.issue(Some(&CardExchange::Receive { from: *sender, message }), &[], &[], stream)?;
                    }
                }
                NcclLink::Group(members) => collectives.values().try_for_each(|terms| {
                    let exchange = CardExchange::Collective { members: members.clone(), terms: *terms, from, to };
                    nccl.issue(Some(&exchange), &[], &[], stream)
                })?,
            }
        }
        while !stream.is_idle()? {
            nccl.look()?;
            if Instant::now() > deadline {
                return Err("the first exchanges took too long: is another rank gone?".into());
            }
            std::thread::sleep(AGAIN);
        }
        Ok(nccl)
    }

    /// Makes the communicators of a round's groups, of which this rank's is returned if it is in one. That of all
    /// ranks is there.
    fn split(&self, round: &[(NcclLink, LinkCollectives)], deadline: Instant) -> Result<Option<(Vec<u64>, Comm)>, String> {
        let groups: Vec<&Vec<u64>> = round.iter().filter_map(|(l, _)| if let NcclLink::Group(members) = l { Some(members) } else { None }).collect();
        if groups.is_empty() {
            return Ok(None);
        }
        let own = groups.into_iter().find(|members| members.contains(&self.rank));
        let color = own.map_or(NO_COLOR, |members| members[0] as i32);
        let key = own.and_then(|members| members.iter().position(|m| *m == self.rank)).unwrap_or(0) as i32;
        let mut config = configuration(self.max_ctas);
        // A thread of NCCL writes this when the split is through. If the split fails, the box is leaked for that
        // thread.
        let place = Box::into_raw(Box::new(null_mut()));
        // SAFETY: all arguments live until the split is through.
        check("ncclCommSplit", unsafe { library::ncclCommSplit(self.world.0, color, key, place, &mut config) })?;
        self.world.settle("ncclCommSplit", deadline)?;
        // SAFETY: it came from a box, and NCCL is through with it.
        let comm = Comm(*unsafe { Box::from_raw(place) });
        let Some(members) = own else { return Ok(None) };
        comm.settle("ncclCommSplit", deadline)?;
        Ok(Some((members.clone(), comm)))
    }

    /// Looks for errors that came since a call returned.
    ///
    /// # Errors
    /// What NCCL says.
    pub fn look(&self) -> Result<(), String> {
        for comm in self.groups.values().chain([&self.world]) {
            check("NCCL, later on", comm.state("NCCL")?)?;
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
        self.groups.values_mut().try_for_each(&mut end)?;
        end(&mut self.world)
    }

    /// Issues what happens at once: an exchange, if there is one, and messages that go out, from these places.
    ///
    /// # Errors
    /// What NCCL says.
    pub(super) fn issue(&self, exchange: Option<&CardExchange>, outgoing: &[Outgoing], places: &[u64], stream: &Stream) -> Result<(), String> {
        let (name, comm, result) = match exchange {
            Some(CardExchange::Collective { members, terms, from, to }) => {
                let comm = self.groups.get(members).ok_or_else(|| format!("no communicator of ranks {members:?}"))?;
                (terms.kind.name(), comm, comm.collective(members, self.rank, terms, [*from, *to], stream)?)
            }
            Some(CardExchange::Receive { from, message }) => {
                ("message", &self.world, self.world.messages(Some((*from, message)), outgoing, places, stream)?)
            }
            None => ("message", &self.world, self.world.messages(None, outgoing, places, stream)?),
        };
        check(name, result)?;
        comm.settle(name, Instant::now() + self.limit)
    }
}

/// Bytes of the larger of a collective's ranges.
fn room(terms: &Terms, members: usize) -> u64 {
    let count = match terms.kind {
        Collective::AllReduce(_) | Collective::Shift => terms.count,
        Collective::AllGather | Collective::ReduceScatter(_) | Collective::AllToAll => terms.count.saturating_mul(members as u64),
    };
    count.saturating_mul(terms.dtype.bytes()).next_multiple_of(ALIGN)
}
