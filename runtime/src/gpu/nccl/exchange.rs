//! What ranks exchange, as NCCL's operations: collectives, and sends and receives joined to what is none of NCCL's
//! own.

use super::comm::{Comm, check};
use super::library;
use crate::comm::Terms;
use crate::gpu::cuda::Stream;
use crate::gpu::{CardMessage, Outgoing};
use cudarc::nccl::sys::{ncclDataType_t, ncclRedOp_t, ncclResult_t};
use ir::op::{DType, Reduce};
use ir::program::Collective;
use std::ffi::c_void;

impl Comm {
    /// What a rank issues of a collective of these members.
    pub(super) fn collective(
        &self,
        members: &[u64],
        rank: u64,
        terms: &Terms,
        [src, dst]: [u64; 2],
        stream: &Stream,
    ) -> Result<ncclResult_t, String> {
        let (ty, count, stream) = (data_type(terms.dtype), terms.count as usize, stream.0.cast());
        let (from, to) = (src as *const c_void, dst as *mut c_void);
        // SAFETY: places lie within their arenas; the communicator and the stream are alive. What is issued between
        // the start and the end of a group happens at once.
        unsafe {
            Ok(match terms.kind {
                Collective::AllReduce(reduce) => library::ncclAllReduce(from, to, count, ty, operation(reduce), self.0, stream),
                Collective::AllGather => library::ncclAllGather(from, to, count, ty, self.0, stream),
                Collective::ReduceScatter(reduce) => library::ncclReduceScatter(from, to, count, ty, operation(reduce), self.0, stream),
                Collective::AllToAll | Collective::Shift => {
                    check("ncclGroupStart", library::ncclGroupStart())?;
                    let issued = parts(members, rank, terms).into_iter().try_for_each(|(other, part)| {
                        let at = part.offset;
                        if part.gives {
                            check("ncclSend", library::ncclSend((src + at) as *const c_void, count, ty, other, self.0, stream))?;
                        }
                        if part.gets {
                            check("ncclRecv", library::ncclRecv((dst + at) as *mut c_void, count, ty, other, self.0, stream))?;
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

    /// Messages of a rank of all at once: what it receives, if anything, and what it sends, at these places.
    pub(super) fn messages(
        &self,
        received: Option<(u64, &CardMessage)>,
        outgoing: &[Outgoing],
        places: &[u64],
        stream: &Stream,
    ) -> Result<ncclResult_t, String> {
        let on = stream.0.cast();
        // SAFETY: as in `collective`.
        unsafe {
            check("ncclGroupStart", library::ncclGroupStart())?;
            let sent = outgoing.iter().zip(places).try_for_each(|(o, place)| {
                check("ncclSend", library::ncclSend(*place as *const c_void, o.count as usize, data_type(o.dtype), o.to as i32, self.0, on))
            });
            let got = received.map_or(Ok(()), |(from, m)| {
                check("ncclRecv", library::ncclRecv(m.address as *mut c_void, m.count as usize, data_type(m.dtype), from as i32, self.0, on))
            });
            let ended = library::ncclGroupEnd();
            sent.and(got)?;
            Ok(ended)
        }
    }
}

/// What passes between this rank and another member: whether it gives or gets, and how many bytes on from the start
/// of both ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PeerTransfer {
    gives: bool,
    gets: bool,
    offset: u64,
}

/// What a rank gives to and gets from each member in an all-to-all or a shift to the next member.
fn parts(members: &[u64], rank: u64, terms: &Terms) -> Vec<(i32, PeerTransfer)> {
    let n = members.len();
    let me = members.iter().position(|m| *m == rank).unwrap_or(0);
    let part = |k: usize| match terms.kind {
        Collective::Shift => PeerTransfer { gives: k == (me + 1) % n, gets: (k + 1) % n == me, offset: 0 },
        Collective::AllToAll | Collective::AllReduce(_) | Collective::AllGather | Collective::ReduceScatter(_) => {
            PeerTransfer { gives: true, gets: true, offset: k as u64 * terms.count * terms.dtype.bytes() }
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

    #[test]
    fn a_shift_goes_to_the_next_member_and_comes_from_the_one_before() {
        let terms = |kind| Terms { kind, dtype: DType::F32, count: 3 };
        let part = |gives, gets, offset| PeerTransfer { gives, gets, offset };
        assert_eq!(parts(&[1, 4, 7], 4, &terms(Collective::Shift)), [(0, part(false, true, 0)), (2, part(true, false, 0))]);
        assert_eq!(parts(&[1, 4], 1, &terms(Collective::Shift)), [(1, part(true, true, 0))]);
        assert_eq!(parts(&[1, 4], 1, &terms(Collective::AllToAll)), [(0, part(true, true, 0)), (1, part(true, true, 12))]);
    }
}
