//! One instruction while it is decoded: modifiers and operands, each to be used exactly once.

use super::{Names, Register, Scope, symbol};
use crate::fault::LoadError;
use crate::inst::*;
use crate::syntax::{self, Number, Operand};
use std::cell::Cell;

pub struct Cursor<'a> {
    pub instruction: &'a syntax::Instruction,
    scope: &'a Scope,
    pub names: &'a Names,
    pub name: &'a str,
    /// Modifiers, and whether each has been used.
    modifiers: Vec<(&'a str, Cell<bool>)>,
}

pub type Result<T> = std::result::Result<T, LoadError>;

impl<'a> Cursor<'a> {
    pub fn new(instruction: &'a syntax::Instruction, scope: &'a Scope, names: &'a Names) -> Result<Cursor<'a>> {
        let mut parts = instruction.opcode.split('.');
        let name = parts.next().expect("invariant: an opcode has a name");
        Ok(Cursor { instruction, scope, names, name, modifiers: parts.map(|m| (m, Cell::new(false))).collect() })
    }

    pub fn decode(&self) -> Result<Inst> {
        let guard = match &self.instruction.guard {
            Some((name, negated)) => Some((self.predicate_named(name)?, *negated)),
            None => None,
        };
        let found = [Cursor::arithmetic, Cursor::memory, Cursor::sync, Cursor::matrix].iter().find_map(|f| f(self).transpose());
        let op = found.unwrap_or_else(|| Err(self.error(format!("`{}` is not supported", self.instruction.opcode))))?;
        match self.modifiers.iter().find(|m| !m.1.get()) {
            Some((m, _)) => Err(self.error(format!("`.{m}` of `{}` is not supported", self.instruction.opcode))),
            None => Ok(Inst { guard, op, feeds_wgmma: false }),
        }
    }

    pub fn error(&self, message: impl Into<String>) -> LoadError {
        LoadError { line: self.instruction.line, message: message.into() }
    }

    /// Uses a modifier, if it is there.
    pub fn has(&self, modifier: &str) -> bool {
        let found = self.modifiers.iter().find(|m| m.0 == modifier && !m.1.get());
        found.inspect(|m| m.1.set(true)).is_some()
    }

    /// Uses modifiers that change nothing here.
    pub fn ignore(&self, modifiers: &[&str]) {
        modifiers.iter().for_each(|m| while self.has(m) {});
    }

    /// Uses the first modifier that a function knows.
    pub fn find<T>(&self, f: impl Fn(&str) -> Option<T>) -> Option<T> {
        self.modifiers.iter().filter(|m| !m.1.get()).find_map(|m| f(m.0).inspect(|_| m.1.set(true)))
    }

    /// The next type, in order.
    pub fn ty(&self) -> Result<Ty> {
        self.find(ty).ok_or_else(|| self.error(format!("`{}` has no type that is supported", self.instruction.opcode)))
    }

    /// The number of operands.
    pub fn count(&self) -> usize {
        self.instruction.operands.len()
    }

    pub fn operand(&self, k: usize) -> Result<&'a Operand> {
        self.instruction.operands.get(k).ok_or_else(|| self.error(format!("`{}` lacks operand {}", self.instruction.opcode, k + 1)))
    }

    fn unexpected<T>(&self, o: &Operand) -> Result<T> {
        Err(self.error(format!("operand {o:?} does not fit `{}`", self.instruction.opcode)))
    }

    pub fn predicate_named(&self, name: &str) -> Result<P> {
        match self.scope.find(name) {
            Some(Register::P(p)) => Ok(p),
            Some(Register::W(_) | Register::D(_)) | None => Err(self.error(format!("`{name}` is no predicate register"))),
        }
    }

    pub fn label(&self, k: usize) -> Result<u32> {
        match self.operand(k)? {
            Operand::Symbol(s) => self.names.labels.get(s).copied().ok_or_else(|| self.error(format!("there is no label `{s}`"))),
            o => self.unexpected(o),
        }
    }

    /// An immediate integer.
    pub fn immediate(&self, k: usize) -> Result<i64> {
        match self.operand(k)? {
            Operand::Number(Number::Int(n)) => Ok(*n),
            o => self.unexpected(o),
        }
    }

    pub fn sw(&self, k: usize) -> Result<Sw> {
        self.sw_of(self.operand(k)?)
    }

    pub fn sw_of(&self, o: &Operand) -> Result<Sw> {
        match o {
            Operand::Symbol(s) => match self.scope.find(s) {
                Some(Register::W(w)) => Ok(Sw::Reg(w)),
                Some(Register::D(_) | Register::P(_)) => self.unexpected(o),
                None => match special(s).map(Sw::Special).or_else(|| symbol(self.names, s).map(|v| Sw::Imm(v as u32))) {
                    Some(v) => Ok(v),
                    None => Err(self.error(format!("`{s}` is not declared"))),
                },
            },
            Operand::Number(Number::Int(n)) => Ok(Sw::Imm(*n as u32)),
            Operand::Number(Number::F32(bits)) => Ok(Sw::Imm(*bits)),
            Operand::Number(Number::F64(bits)) => Ok(Sw::Imm((f64::from_bits(*bits) as f32).to_bits())),
            Operand::Negated(_) | Operand::Pair(..) | Operand::Vector(_) | Operand::Address(..) | Operand::Group(_) => self.unexpected(o),
        }
    }

    pub fn sd(&self, k: usize) -> Result<Sd> {
        self.sd_of(self.operand(k)?)
    }

    pub fn sd_of(&self, o: &Operand) -> Result<Sd> {
        match o {
            Operand::Symbol(s) => match self.scope.find(s) {
                Some(Register::D(d)) => Ok(Sd::Reg(d)),
                Some(Register::W(_) | Register::P(_)) => self.unexpected(o),
                None if s == "%clock64" || s == "%globaltimer" => Ok(Sd::Clock),
                None => symbol(self.names, s).map(Sd::Imm).ok_or_else(|| self.error(format!("`{s}` is not declared"))),
            },
            Operand::Number(Number::Int(n)) => Ok(Sd::Imm(*n as u64)),
            Operand::Number(Number::F64(bits)) => Ok(Sd::Imm(*bits)),
            Operand::Number(Number::F32(_))
            | Operand::Negated(_)
            | Operand::Pair(..)
            | Operand::Vector(_)
            | Operand::Address(..)
            | Operand::Group(_) => self.unexpected(o),
        }
    }

    /// A source of the size of a type.
    pub fn src(&self, k: usize, ty: Ty) -> Result<Src> {
        self.src_of(self.operand(k)?, ty)
    }

    pub fn src_of(&self, o: &Operand, ty: Ty) -> Result<Src> {
        if ty.bytes() == 8 { self.sd_of(o).map(Src::D) } else { self.sw_of(o).map(Src::W) }
    }

    /// The source of a store. Its register may be wider than the type, whose bits are then the lower ones (PTX ISA,
    /// section 9.4.1).
    pub fn stored(&self, o: &Operand, ty: Ty) -> Result<Src> {
        match o {
            Operand::Symbol(s) if matches!(self.scope.find(s), Some(Register::D(_))) => self.sd_of(o).map(Src::D),
            o => self.src_of(o, ty),
        }
    }

    pub fn sp(&self, k: usize) -> Result<Sp> {
        match self.operand(k)? {
            Operand::Symbol(s) => Ok(Sp::Reg(self.predicate_named(s)?, false)),
            Operand::Negated(s) => Ok(Sp::Reg(self.predicate_named(s)?, true)),
            Operand::Number(Number::Int(n)) => Ok(Sp::Const(*n != 0)),
            o => self.unexpected(o),
        }
    }

    pub fn w(&self, k: usize) -> Result<W> {
        self.w_of(self.operand(k)?)
    }

    pub fn w_of(&self, o: &Operand) -> Result<W> {
        match self.reg_of(o)? {
            Reg::W(w) => Ok(w),
            Reg::D(_) | Reg::Sink => self.unexpected(o),
        }
    }

    pub fn d(&self, k: usize) -> Result<D> {
        match self.reg(k)? {
            Reg::D(d) => Ok(d),
            Reg::W(_) | Reg::Sink => self.unexpected(self.operand(k)?),
        }
    }

    pub fn p(&self, k: usize) -> Result<P> {
        match self.operand(k)? {
            Operand::Symbol(s) => self.predicate_named(s),
            o => self.unexpected(o),
        }
    }

    pub fn reg(&self, k: usize) -> Result<Reg> {
        self.reg_of(self.operand(k)?)
    }

    pub fn reg_of(&self, o: &Operand) -> Result<Reg> {
        match o {
            Operand::Symbol(s) if s == "_" => Ok(Reg::Sink),
            Operand::Symbol(s) => match self.scope.find(s) {
                Some(Register::W(w)) => Ok(Reg::W(w)),
                Some(Register::D(d)) => Ok(Reg::D(d)),
                Some(Register::P(_)) | None => Err(self.error(format!("`{s}` is no register of this kind"))),
            },
            Operand::Negated(_) | Operand::Pair(..) | Operand::Number(_) | Operand::Vector(_) | Operand::Address(..) | Operand::Group(_) => {
                self.unexpected(o)
            }
        }
    }

    /// A result and, after `|`, a predicate.
    pub fn reg_and_predicate(&self, k: usize) -> Result<(Reg, Option<P>)> {
        match self.operand(k)? {
            Operand::Pair(d, p) => Ok((self.reg_of(&Operand::Symbol(d.clone()))?, Some(self.predicate_named(p)?))),
            o => Ok((self.reg_of(o)?, None)),
        }
    }

    /// The operands of a vector, or the one operand.
    pub fn list(&self, k: usize) -> Result<Vec<&'a Operand>> {
        Ok(match self.operand(k)? {
            Operand::Vector(v) => v.iter().collect(),
            o => vec![o],
        })
    }

    pub fn address(&self, k: usize) -> Result<Address> {
        Ok(self.address_with(k)?.0)
    }

    /// An address, and what else stands in its brackets.
    pub fn address_with(&self, k: usize) -> Result<(Address, &'a [Operand])> {
        match self.operand(k)? {
            Operand::Address(base, offset, more) => {
                let base = match &**base {
                    Operand::Symbol(s) => match self.scope.find(s) {
                        Some(Register::W(w)) => Sd::Low(w),
                        Some(Register::D(d)) => Sd::Reg(d),
                        Some(Register::P(_)) => return self.unexpected(base),
                        None => self.sd_of(base)?,
                    },
                    o => self.sd_of(o)?,
                };
                Ok((Address { base, offset: *offset }, more))
            }
            o => self.unexpected(o),
        }
    }
}

/// A type by its modifier. Untyped bits read as unsigned.
pub fn ty(modifier: &str) -> Option<Ty> {
    Some(match modifier {
        "b8" | "u8" => Ty::U8,
        "s8" => Ty::S8,
        "b16" | "u16" => Ty::U16,
        "s16" => Ty::S16,
        "b32" | "u32" => Ty::U32,
        "s32" => Ty::S32,
        "b64" | "u64" => Ty::U64,
        "s64" => Ty::S64,
        "f16" => Ty::F16,
        "bf16" => Ty::Bf16,
        "f32" => Ty::F32,
        "f64" => Ty::F64,
        _ => return None,
    })
}

fn special(name: &str) -> Option<Special> {
    let direction = |rest: &str| ["x", "y", "z"].iter().position(|d| *d == rest);
    if let Some((base, d)) = name.split_once('.') {
        let d = direction(d)?;
        return Some(match base {
            "%tid" => Special::Tid(d),
            "%ntid" => Special::Ntid(d),
            "%ctaid" => Special::Ctaid(d),
            "%nctaid" => Special::Nctaid(d),
            "%clusterid" => Special::Cluster(d),
            "%nclusterid" => Special::Clusters(d),
            "%cluster_ctaid" => Special::ClusterCtaid(d),
            "%cluster_nctaid" => Special::ClusterNctaid(d),
            _ => return None,
        });
    }
    Some(match name {
        "%laneid" => Special::Lane,
        "%warpid" => Special::Warp,
        "%lanemask_eq" => Special::Mask(LaneMask::Eq),
        "%lanemask_le" => Special::Mask(LaneMask::Le),
        "%lanemask_lt" => Special::Mask(LaneMask::Lt),
        "%lanemask_ge" => Special::Mask(LaneMask::Ge),
        "%lanemask_gt" => Special::Mask(LaneMask::Gt),
        "%clock" => Special::Clock,
        "%cluster_ctarank" => Special::Rank,
        "%cluster_nctarank" => Special::Ranks,
        "%dynamic_smem_size" => Special::DynamicShared,
        "WARP_SZ" => return None,
        _ => return None,
    })
}
