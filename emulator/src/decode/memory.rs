//! Loads, stores, atomics, addresses, copies (PTX ISA, section 9.7.9).

use super::cursor::{Cursor, Result};
use crate::inst::*;
use crate::syntax::Operand;

fn space(modifier: &str) -> Option<Space> {
    Some(match modifier {
        "global" => Space::Global,
        "shared" | "shared::cta" => Space::Shared,
        "shared::cluster" => Space::Cluster,
        "local" => Space::Local,
        "param" | "param::entry" | "const" => Space::Param,
        _ => return None,
    })
}

fn atomic(modifier: &str) -> Option<Atomic> {
    Some(match modifier {
        "add" => Atomic::Add,
        "min" => Atomic::Min,
        "max" => Atomic::Max,
        "and" => Atomic::And,
        "or" => Atomic::Or,
        "xor" => Atomic::Xor,
        "exch" => Atomic::Exch,
        "cas" => Atomic::Cas,
        "inc" => Atomic::Inc,
        "dec" => Atomic::Dec,
        _ => return None,
    })
}

impl Cursor<'_> {
    pub fn memory(&self) -> Result<Option<Op>> {
        Ok(Some(match self.name {
            "ld" | "st" => self.load_or_store()?,
            "atom" | "red" => self.atomic()?,
            "cvta" => self.cvta()?,
            "prefetch" | "prefetchu" | "discard" | "applypriority" => {
                while self.find(|_| Some(())).is_some() {}
                Op::Nop
            }
            "cp" => self.copy()?,
            "mapa" => {
                let space = self.find(space).unwrap_or(Space::Generic);
                let ty = self.ty()?;
                Op::MapRank(space, self.reg(0)?, self.src(1, ty)?, self.sw(2)?)
            }
            _ => return Ok(None),
        }))
    }

    /// The memory order of an access. Caching is not modelled.
    fn order(&self) -> Order {
        self.ignore(&["ca", "cg", "cs", "cv", "lu", "wb", "wt", "nc", "weak"]);
        let both = self.has("acq_rel");
        let (release, acquire) = (self.has("release") || both, self.has("acquire") || both);
        let strong = ["volatile", "relaxed"].iter().any(|m| self.has(m)) || release || acquire;
        self.ignore(&["cta", "cluster", "gpu", "sys", "L1::evict_first", "L1::evict_last", "L1::evict_normal", "L1::evict_unchanged"]);
        self.ignore(&["L1::no_allocate", "L2::64B", "L2::128B", "L2::256B", "L2::cache_hint", "unified"]);
        Order { strong, release, acquire }
    }

    fn load_or_store(&self) -> Result<Op> {
        let order = self.order();
        let space = self.find(space).unwrap_or(Space::Generic);
        let count = self.find(|m| [("v2", 2), ("v4", 4), ("v8", 8)].iter().find(|v| v.0 == m).map(|v| v.1)).unwrap_or(1);
        let ty = self.ty()?;
        let list = self.list(if self.name == "ld" { 0 } else { 1 })?;
        if list.len() != count {
            return Err(self.error(format!("`{}` has {} registers", self.instruction.opcode, list.len())));
        }
        if self.name == "ld" {
            let d = list.iter().map(|o| self.reg_of(o)).collect::<Result<_>>()?;
            return Ok(Op::Load { space, order, ty, d, a: self.address(1)? });
        }
        let s = list.iter().map(|o| self.stored(o, ty)).collect::<Result<_>>()?;
        Ok(Op::Store { space, order, ty, s, a: self.address(0)? })
    }

    fn atomic(&self) -> Result<Op> {
        let order = Order { strong: true, ..self.order() };
        self.ignore(&["noftz"]);
        let space = self.find(space).unwrap_or(Space::Generic);
        let op = self.find(atomic).ok_or_else(|| self.error("an atomic operation that is not supported"))?;
        let ty = self.ty()?;
        if ty.is_float() && (ty != Ty::F32 || op != Atomic::Add && op != Atomic::Exch) {
            return Err(self.error(format!("`{}` is not supported", self.instruction.opcode)));
        }
        let first = usize::from(self.name == "atom");
        let d = if first == 1 { self.reg(0)? } else { Reg::Sink };
        let c = if op == Atomic::Cas { Some(self.src(first + 2, ty)?) } else { None };
        Ok(Op::Atom { op, order, space, ty, d, a: self.address(first)?, b: self.src(first + 1, ty)?, c })
    }

    fn cvta(&self) -> Result<Op> {
        let from = self.has("to");
        let space = self.find(space).ok_or_else(|| self.error("`cvta` of a space that is not supported"))?;
        let ty = self.ty()?;
        let (d, a) = (self.reg(0)?, self.src(1, ty)?);
        Ok(if from { Op::FromGeneric(space, d, a) } else { Op::ToGeneric(space, d, a) })
    }

    /// `cp.async` and its bulk forms.
    fn copy(&self) -> Result<Op> {
        if !self.has("async") {
            return Err(self.error(format!("`{}` is not supported", self.instruction.opcode)));
        }
        if self.has("bulk") {
            return self.bulk();
        }
        if self.has("commit_group") {
            return Ok(Op::CpCommit);
        }
        if self.has("wait_group") {
            return Ok(Op::CpWait(Some(self.immediate(0)? as u32)));
        }
        if self.has("wait_all") {
            return Ok(Op::CpWait(None));
        }
        if self.has("mbarrier") {
            let plain = self.has("arrive");
            let count = !self.has("noinc");
            self.ignore(&["shared", "shared::cta", "b64"]);
            return if plain {
                Ok(Op::CpArrive { a: self.address(0)?, count })
            } else {
                Err(self.error("a `cp.async.mbarrier` that is not supported"))
            };
        }
        self.ignore(&["ca", "cg", "shared", "shared::cta", "global", "L2::64B", "L2::128B", "L2::256B"]);
        let bytes = self.immediate(2)? as u32;
        if ![4, 8, 16].contains(&bytes) {
            return Err(self.error("`cp.async` copies 4, 8 or 16 bytes"));
        }
        let read = if self.count() > 3 { Some(self.sw(3)?) } else { None };
        Ok(Op::CpAsync { bytes, d: self.address(0)?, s: self.address(1)?, read })
    }

    fn bulk(&self) -> Result<Op> {
        if self.has("commit_group") {
            return Ok(Op::BulkCommit);
        }
        if self.has("wait_group") {
            return Ok(Op::BulkWait { left: self.immediate(0)? as u32, read: self.has("read") });
        }
        let tensor = self.has("tensor");
        let dims = self.find(|m| ["1d", "2d", "3d", "4d", "5d"].iter().position(|d| *d == m)).map(|d| d + 1);
        // The first space is that of the destination.
        let load = self.find(|m| space(m).map(|s| s != Space::Global)).ok_or_else(|| self.error("a bulk copy without a destination"))?;
        let many = self.has("multicast::cluster");
        self.ignore(&["global", "shared::cta", "tile", "bulk_group", "mbarrier::complete_tx::bytes", "L2::cache_hint"]);
        let coordinates = |more: &[Operand]| match more {
            [Operand::Vector(v)] if Some(v.len()) == dims => v.iter().map(|o| self.sw_of(o)).collect::<Result<Coordinates>>(),
            _ => Err(self.error("a tensor copy has its coordinates behind the tensor map, as many as dims")),
        };
        let ranks = |k: usize| if many { Ok(Some(self.sw(k)?)) } else { Ok(None) };
        Ok(match (tensor, load) {
            (true, true) => {
                let (map, more) = self.address_with(1)?;
                Op::TensorLoad { d: self.address(0)?, map, at: coordinates(more)?, barrier: self.address(2)?, ranks: ranks(3)? }
            }
            (true, false) => {
                let (map, more) = self.address_with(0)?;
                Op::TensorStore { map, at: coordinates(more)?, s: self.address(1)? }
            }
            (false, true) => {
                Op::BulkLoad { d: self.address(0)?, s: self.address(1)?, bytes: self.sw(2)?, barrier: self.address(3)?, ranks: ranks(4)? }
            }
            (false, false) => Op::BulkStore { d: self.address(0)?, s: self.address(1)?, bytes: self.sw(2)? },
        })
    }
}
