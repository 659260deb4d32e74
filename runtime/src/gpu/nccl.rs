//! NCCL: what GPUs exchange without the host. The library is loaded when it is asked for, 2.18 or newer.
//!
//! Which communicators there are, and the order in which they are made, follows from the job alone ([`rounds`]): one for each group, and one for each
//! pair of ranks and channel, so that messages of one never wait for those of another. All start without blocking and within a time limit; errors that
//! come later are found while waiting, and end all communicators.

mod comm;
mod exchange;
mod library;
mod links;

use super::cuda::{Reserved, Stream};
use super::{Between, End};
use comm::{AGAIN, Comm, check, configuration};
use cudarc::nccl::sys;
use ir::op::DType;
use ir::program::Job;
use links::{Link, rounds};
use std::collections::BTreeMap;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

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

/// What all ranks need to make their first communicator. The process that makes it, rank 0's launcher, must last until they have.
///
/// # Errors
/// What NCCL says.
pub fn unique_id() -> Result<Vec<u8>, String> {
    let mut id = sys::ncclUniqueId { internal: [0; ID] };
    // SAFETY: `id` is writable.
    check("ncclGetUniqueId", unsafe { library::ncclGetUniqueId(&mut id) })?;
    Ok(id.internal.iter().map(|b| *b as u8).collect())
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
                    let end = if link.members[0] == rank { End::SendTo(link.members[1]) } else { End::ReceiveFrom(link.members[0]) };
                    check("the first message", comm.message(end, DType::Bool, 1, byte.start(), stream))?;
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
                (terms.kind.name(), comm, comm.collective(members, self.rank, terms, [*from, *to], stream)?)
            }
            Between::Message { end, channel, dtype, count, address } => {
                let members = match end {
                    End::SendTo(to) => vec![self.rank, *to],
                    End::ReceiveFrom(from) => vec![*from, self.rank],
                };
                let comm = self.link(Link { members, channel: Some(*channel) })?;
                ("message", comm, comm.message(*end, *dtype, *count, *address, stream))
            }
        };
        check(name, result)?;
        comm.settle(name, Instant::now() + self.limit)
    }
}
