//! Control flow, barriers, fences, and what lanes of a warp exchange (PTX ISA, sections 9.7.12 and 9.7.13).

use super::cursor::{Cursor, Result};
use crate::inst::*;

impl Cursor<'_> {
    pub fn sync(&self) -> Result<Option<Op>> {
        Ok(Some(match self.name {
            "bra" => {
                self.ignore(&["uni"]);
                Op::Bra { to: self.label(0)? }
            }
            "ret" | "exit" => {
                self.ignore(&["uni"]);
                Op::Exit
            }
            "trap" => Op::Trap,
            "bar" | "barrier" => self.bar()?,
            "membar" | "fence" => self.fence()?,
            "nanosleep" | "griddepcontrol" | "pmevent" => {
                while self.find(|_| Some(())).is_some() {}
                Op::Nop
            }
            "setmaxnreg" => self.set_registers()?,
            "shfl" => self.shfl()?,
            "vote" => self.vote()?,
            "redux" => self.redux()?,
            "activemask" => {
                self.ignore(&["b32"]);
                Op::ActiveMask(self.w(0)?)
            }
            "elect" => {
                self.ignore(&["sync"]);
                match self.reg_and_predicate(0)? {
                    (d, Some(p)) => Op::Elect(d, p, self.sw(1)?),
                    (_, None) => return Err(self.error("`elect.sync` gives a lane and a predicate")),
                }
            }
            "mbarrier" => self.mbarrier()?,
            _ => return Ok(None),
        }))
    }

    fn bar(&self) -> Result<Op> {
        if self.has("warp") {
            self.ignore(&["sync"]);
            return Ok(Op::SyncWarp(self.sw(0)?));
        }
        if self.has("cluster") {
            return self.cluster_barrier();
        }
        self.ignore(&["cta"]);
        let wait = self.has("sync");
        if !wait && !self.has("arrive") {
            return Err(self.error(format!("`{}` is not supported", self.instruction.opcode)));
        }
        // `bar` stands for `barrier.aligned`.
        let aligned = self.has("aligned") || self.name == "bar";
        let id = if self.count() > 0 { self.sw(0)? } else { Sw::Imm(0) };
        let threads = if self.count() > 1 { Some(self.sw(1)?) } else { None };
        Ok(Op::Bar { id, threads, wait, aligned })
    }

    /// `barrier.cluster`, whose `.aligned` is only a promise.
    fn cluster_barrier(&self) -> Result<Op> {
        let (arrive, wait) = (self.has("arrive"), self.has("wait"));
        self.ignore(&["aligned", "release", "acquire"]);
        match (arrive, wait) {
            (true, false) => Ok(Op::ClusterArrive { release: !self.has("relaxed") }),
            (false, true) => Ok(Op::ClusterWait),
            _ => Err(self.error(format!("`{}` is not supported", self.instruction.opcode))),
        }
    }

    fn fence(&self) -> Result<Op> {
        if self.has("mbarrier_init") {
            self.ignore(&["release", "cluster"]);
            return Ok(Op::FenceBarriers);
        }
        if self.has("proxy") {
            if !["async", "async.shared::cta", "async::generic"].iter().any(|m| self.has(m)) {
                return Err(self.error(format!("`{}` is not supported", self.instruction.opcode)));
            }
            self.ignore(&["shared::cta", "shared::cluster", "global", "acquire", "release", "sync_restrict::shared::cta", "cluster"]);
            return Ok(Op::FenceProxy);
        }
        let wide = ["gl", "sys", "gpu"].iter().any(|m| self.has(m));
        self.ignore(&["cta", "cluster", "sc", "acq_rel", "acquire", "release"]);
        Ok(if wide { Op::Fence } else { Op::Nop })
    }

    fn set_registers(&self) -> Result<Op> {
        self.ignore(&["sync", "aligned", "u32"]);
        let more = self.has("inc");
        let count = self.immediate(0)?;
        if !more && !self.has("dec") {
            return Err(self.error(format!("`{}` is not supported", self.instruction.opcode)));
        }
        if !(24..=256).contains(&count) || count % 8 != 0 {
            return Err(self.error(format!("a thread has 24 to 256 registers, in eights, not {count}")));
        }
        Ok(Op::Registers(count as u32, more))
    }

    fn shfl(&self) -> Result<Op> {
        let kind = self.find(|m| {
            Some(match m {
                "up" => Shuffle::Up,
                "down" => Shuffle::Down,
                "bfly" => Shuffle::Butterfly,
                "idx" => Shuffle::Index,
                _ => return None,
            })
        });
        let kind = kind.ok_or_else(|| self.error("a `shfl` that is not supported"))?;
        self.ignore(&["sync", "b32"]);
        let (d, p) = match self.reg_and_predicate(0)? {
            (Reg::W(d), p) => (d, p),
            (Reg::D(_) | Reg::Sink, _) => return Err(self.error("`shfl` gives 32 bits")),
        };
        Ok(Op::Shfl { kind, d, p, a: self.sw(1)?, b: self.sw(2)?, c: self.sw(3)?, members: self.sw(4)? })
    }

    fn vote(&self) -> Result<Op> {
        self.ignore(&["sync"]);
        let kind = self.find(|m| {
            Some(match m {
                "all" => Vote::All,
                "any" => Vote::Any,
                "uni" => Vote::Uniform,
                "ballot" => Vote::Ballot,
                _ => return None,
            })
        });
        let kind = kind.ok_or_else(|| self.error("a `vote` that is not supported"))?;
        self.ignore(&["pred", "b32"]);
        let (d, p) = match kind {
            Vote::Ballot => (self.reg(0)?, None),
            Vote::All | Vote::Any | Vote::Uniform => (Reg::Sink, Some(self.p(0)?)),
        };
        Ok(Op::Vote { kind, d, p, a: self.sp(1)?, members: self.sw(2)? })
    }

    fn redux(&self) -> Result<Op> {
        self.ignore(&["sync"]);
        let op = self.find(|m| {
            Some(match m {
                "add" => Atomic::Add,
                "min" => Atomic::Min,
                "max" => Atomic::Max,
                "and" => Atomic::And,
                "or" => Atomic::Or,
                "xor" => Atomic::Xor,
                _ => return None,
            })
        });
        let op = op.ok_or_else(|| self.error("a `redux` that is not supported"))?;
        let ty = self.ty()?;
        if ty.is_float() {
            return Err(self.error("`redux` of floats is not supported"));
        }
        Ok(Op::Redux { op, ty, d: self.w(0)?, a: self.sw(1)?, members: self.sw(2)? })
    }

    fn mbarrier(&self) -> Result<Op> {
        let kind = self.find(|m| ["init", "inval", "arrive", "expect_tx", "try_wait", "test_wait"].into_iter().find(|k| *k == m));
        let expect = kind == Some("arrive") && self.has("expect_tx");
        let parity = self.has("parity");
        let scope = if self.has("cluster") { MemoryScope::Cluster } else { MemoryScope::Block };
        self.ignore(&["shared", "shared::cta", "shared::cluster", "b64", "release", "acquire", "cta"]);
        Ok(match kind {
            Some("init") => Op::BarrierInit(self.address(0)?, self.sw(1)?),
            Some("inval") => Op::BarrierInval(self.address(0)?),
            Some("expect_tx") => {
                self.ignore(&["relaxed"]);
                Op::BarrierArrive { a: self.address(0)?, what: Arrive::ExpectOnly(self.sw(1)?), state: None, scope }
            }
            Some("arrive") => {
                let state = match self.reg(0)? {
                    Reg::D(d) => Some(d),
                    Reg::Sink => None,
                    Reg::W(_) => return Err(self.error("the state of an mbarrier has 64 bits")),
                };
                let number = if self.count() > 2 { self.sw(2)? } else { Sw::Imm(1) };
                let what = if expect { Arrive::Expect(number) } else { Arrive::Count(number) };
                Op::BarrierArrive { a: self.address(1)?, what, state, scope }
            }
            Some(kind @ ("try_wait" | "test_wait")) => {
                let phase = if parity { Src::W(self.sw(2)?) } else { Src::D(self.sd(2)?) };
                Op::BarrierTest { d: self.p(0)?, a: self.address(1)?, phase, parity, suspend: kind == "try_wait", scope }
            }
            _ => return Err(self.error(format!("`{}` is not supported", self.instruction.opcode))),
        })
    }
}
