//! Matrix instructions: `ldmatrix`, `stmatrix`, `mma.sync`, `wgmma` (PTX ISA, sections 9.7.14 and 9.7.15).

use super::constant;
use super::cursor::{Cursor, Result};
use crate::inst::*;
use crate::syntax::Operand;

fn element(modifier: &str) -> Option<Element> {
    Some(match modifier {
        "f16" => Element::F16,
        "bf16" => Element::Bf16,
        "tf32" => Element::Tf32,
        _ => return None,
    })
}

impl Cursor<'_> {
    pub fn matrix(&self) -> Result<Option<Op>> {
        Ok(Some(match self.name {
            "ldmatrix" | "stmatrix" => {
                self.ignore(&["sync", "aligned", "m8n8", "shared", "shared::cta", "b16"]);
                let count = self.find(|m| [("x1", 1), ("x2", 2), ("x4", 4)].iter().find(|x| x.0 == m).map(|x| x.1));
                let transpose = self.has("trans");
                let list = self.list(if self.name == "ldmatrix" { 0 } else { 1 })?;
                if Some(list.len()) != count {
                    return Err(self.error(format!("`{}` has {} registers", self.instruction.opcode, list.len())));
                }
                if self.name == "ldmatrix" {
                    Op::LdMatrix { d: list.iter().map(|o| self.w_of(o)).collect::<Result<_>>()?, a: self.address(1)?, transpose }
                } else {
                    Op::StMatrix { a: self.address(0)?, s: list.iter().map(|o| self.sw_of(o)).collect::<Result<_>>()?, transpose }
                }
            }
            "mma" => self.mma()?,
            "wgmma" => self.wgmma()?,
            _ => return Ok(None),
        }))
    }

    fn words(&self, k: usize) -> Result<Box<[Sw]>> {
        self.list(k)?.into_iter().map(|o| self.sw_of(o)).collect()
    }

    fn registers(&self, k: usize) -> Result<Box<[W]>> {
        self.list(k)?.into_iter().map(|o| self.w_of(o)).collect()
    }

    fn mma(&self) -> Result<Op> {
        self.ignore(&["sync", "aligned", "row", "col"]);
        let k = self.find(|m| [("m16n8k4", 4), ("m16n8k8", 8), ("m16n8k16", 16)].iter().find(|s| s.0 == m).map(|s| s.1));
        let k = k.ok_or_else(|| self.error("an `mma` of a shape that is not supported"))?;
        // The types stand in the order d, a, b, c, and both d and c must be f32.
        let sums = self.has("f32") && self.has("f32");
        let (a, b) = (self.find(element), self.find(element));
        let element = match (a, b) {
            (Some(a), Some(b)) if a == b && sums => a,
            _ => return Err(self.error(format!("`{}`: operands of these types are not supported", self.instruction.opcode))),
        };
        let width = if element == Element::Tf32 { 1 } else { 2 };
        if (element == Element::Tf32) == (k == 16) {
            return Err(self.error(format!("`{}`: this shape has other types", self.instruction.opcode)));
        }
        let (d, a, b, c) = (self.registers(0)?, self.words(1)?, self.words(2)?, self.words(3)?);
        if a.len() as u32 != 16 * k / 32 / width || b.len() as u32 != 8 * k / 32 / width {
            return Err(self.error(format!("`{}` has fragments of the wrong size", self.instruction.opcode)));
        }
        let four = |_| self.error("the sums of `mma` are four registers");
        Ok(Op::Mma { element, k, d: (*d).try_into().map_err(four)?, a, b, c: (*c).try_into().map_err(four)? })
    }

    fn wgmma(&self) -> Result<Op> {
        if self.has("fence") {
            self.ignore(&["sync", "aligned"]);
            return Ok(Op::WgmmaFence);
        }
        if self.has("commit_group") {
            self.ignore(&["sync", "aligned"]);
            return Ok(Op::WgmmaCommit);
        }
        if self.has("wait_group") {
            self.ignore(&["sync", "aligned"]);
            return Ok(Op::WgmmaWait(self.immediate(0)? as u32));
        }
        self.ignore(&["mma_async", "sync", "aligned"]);
        let shape = self.find(|m| m.strip_prefix("m64n")?.split_once('k').and_then(|(n, k)| Some((n.parse::<u32>().ok()?, k.parse::<u32>().ok()?))));
        let (n, k) = shape.ok_or_else(|| self.error("a `wgmma` of a shape that is not supported"))?;
        let sums = self.has("f32");
        let (a, b) = (self.find(element), self.find(element));
        let element = match (a, b) {
            (Some(a), Some(b)) if a == b && sums && (k == 8) == (a == Element::Tf32) && (k == 8 || k == 16) && n % 8 == 0 && n <= 256 => a,
            _ => return Err(self.error(format!("`{}`: these types and this shape are not supported", self.instruction.opcode))),
        };
        let accumulators = self.registers(0)?;
        if accumulators.len() as u32 != n / 2 {
            return Err(self.error(format!("`{}` has {} accumulators instead of {}", self.instruction.opcode, accumulators.len(), n / 2)));
        }
        let a = match self.operand(1)? {
            Operand::Vector(_) => MatrixA::Registers(self.registers(1)?),
            _ => MatrixA::Descriptor(self.sd(1)?),
        };
        let flags: Vec<i64> = self.instruction.operands[3..].iter().skip(1).map(|o| constant(o).unwrap_or(i64::MAX)).collect();
        let (negate, transpose) = match (&a, flags.as_slice()) {
            (_, []) => ([false; 2], [false; 2]),
            (_, [x, y]) => ([*x == -1, *y == -1], [false; 2]),
            (MatrixA::Registers(_), [x, y, tb]) => ([*x == -1, *y == -1], [false, *tb == 1]),
            (MatrixA::Descriptor(_), [x, y, ta, tb]) => ([*x == -1, *y == -1], [*ta == 1, *tb == 1]),
            _ => return Err(self.error("a `wgmma` with other immediates than its form has")),
        };
        Ok(Op::Wgmma(Box::new(Wgmma { n, element, accumulators, a, b: self.sd(2)?, scale_d: self.sp(3)?, negate, transpose })))
    }
}
