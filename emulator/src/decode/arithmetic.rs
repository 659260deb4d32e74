//! Arithmetic, comparison, conversion and moves between registers (PTX ISA, sections 9.7.1 to 9.7.9).

use super::cursor::{Cursor, Result, ty};
use crate::inst::*;
use crate::syntax::Operand;

/// The packed 16-bit floats.
fn packed(modifier: &str) -> Option<Element> {
    match modifier {
        "f16x2" => Some(Element::F16),
        "bf16x2" => Some(Element::Bf16),
        _ => None,
    }
}

fn element(ty: Ty) -> Option<Element> {
    match ty {
        Ty::F16 => Some(Element::F16),
        Ty::Bf16 => Some(Element::Bf16),
        Ty::U8 | Ty::S8 | Ty::U16 | Ty::S16 | Ty::U32 | Ty::S32 | Ty::U64 | Ty::S64 | Ty::F32 | Ty::F64 => None,
    }
}

/// The type of numbers that arithmetic works on.
enum NumberType {
    Int(Ty),
    F32,
    F64,
    /// 16-bit floats, with the number of them in a register.
    Half(Element, u32),
    Predicate,
}

impl Cursor<'_> {
    fn kind(&self) -> Result<NumberType> {
        if let Some(e) = self.find(packed) {
            return Ok(NumberType::Half(e, 2));
        }
        if self.has("pred") {
            return Ok(NumberType::Predicate);
        }
        Ok(match self.ty()? {
            Ty::F32 => NumberType::F32,
            Ty::F64 => NumberType::F64,
            t => match element(t) {
                Some(e) => NumberType::Half(e, 1),
                None => NumberType::Int(t),
            },
        })
    }

    fn mode(&self) -> Mode {
        let exact = matches!(self.name, "div" | "sqrt" | "rcp") && self.has("rn");
        Mode { flush: self.has("ftz"), saturate: self.has("sat"), exact }
    }

    fn unsupported<T>(&self) -> Result<T> {
        Err(self.error(format!("`{}` is not supported", self.instruction.opcode)))
    }

    pub fn arithmetic(&self) -> Result<Option<Op>> {
        Ok(Some(match self.name {
            "mov" => self.mov()?,
            "add" | "sub" | "min" | "max" | "div" | "rem" | "and" | "or" | "xor" | "shl" | "shr" => self.two()?,
            "copysign" => match self.kind()? {
                NumberType::F32 => Op::F2(Float2::CopySign, Mode::default(), self.w(0)?, self.sw(1)?, self.sw(2)?),
                NumberType::F64 => Op::D2(Float2::CopySign, self.d(0)?, self.sd(1)?, self.sd(2)?),
                NumberType::Int(_) | NumberType::Half(..) | NumberType::Predicate => return self.unsupported(),
            },
            "mul" => self.mul()?,
            "mad" | "fma" => self.mad()?,
            "neg" | "abs" | "not" | "sqrt" | "rcp" | "rsqrt" | "ex2" | "lg2" | "sin" | "cos" | "tanh" | "popc" | "clz" | "brev" => self.one()?,
            "shf" => {
                let left = self.has("l");
                let wrap = (left || self.has("r")) && self.has("wrap");
                self.ignore(&["clamp", "b32"]);
                Op::Funnel { left, wrap, d: self.w(0)?, lo: self.sw(1)?, hi: self.sw(2)?, by: self.sw(3)? }
            }
            "bfe" => match self.ty()? {
                t if t.bytes() == 8 => Op::ExtractD(t, self.d(0)?, self.sd(1)?, self.sw(2)?, self.sw(3)?),
                t => Op::ExtractW(t, self.w(0)?, self.sw(1)?, self.sw(2)?, self.sw(3)?),
            },
            "bfi" => match self.ty()?.bytes() {
                8 => Op::InsertD(self.d(0)?, self.sd(1)?, self.sd(2)?, self.sw(3)?, self.sw(4)?),
                _ => Op::InsertW(self.w(0)?, self.sw(1)?, self.sw(2)?, self.sw(3)?, self.sw(4)?),
            },
            "prmt" => {
                self.ignore(&["b32"]);
                Op::Prmt(self.w(0)?, self.sw(1)?, self.sw(2)?, self.sw(3)?)
            }
            "lop3" => {
                self.ignore(&["b32"]);
                Op::Lop3(self.w(0)?, self.sw(1)?, self.sw(2)?, self.sw(3)?, self.immediate(4)? as u8)
            }
            "setp" => self.setp()?,
            "selp" => match self.ty()?.bytes() {
                8 => Op::SelD(self.d(0)?, self.sd(1)?, self.sd(2)?, self.sp(3)?),
                _ => Op::SelW(self.w(0)?, self.sw(1)?, self.sw(2)?, self.sp(3)?),
            },
            "cvt" => self.convert()?,
            _ => return Ok(None),
        }))
    }

    fn mov(&self) -> Result<Op> {
        if self.has("pred") {
            return Ok(Op::MovP(self.p(0)?, self.sp(1)?));
        }
        let bytes = match self.find(packed) {
            Some(_) => 4,
            None => self.ty()?.bytes(),
        };
        let part = |n: usize| bytes / n as u32;
        match (self.operand(0)?, self.operand(1)?) {
            (_, Operand::Vector(v)) if bytes == 8 && v.len() == 1 => self.unsupported(),
            (_, Operand::Vector(v)) => {
                let parts = v.iter().map(|o| self.sw_of(o)).collect::<Result<_>>()?;
                Ok(Op::Pack(self.reg(0)?, parts, part(v.len())))
            }
            (Operand::Vector(v), _) => {
                let from = if bytes == 8 { Src::D(self.sd(1)?) } else { Src::W(self.sw(1)?) };
                Ok(Op::Unpack(v.iter().map(|o| self.reg_of(o)).collect::<Result<_>>()?, from, part(v.len())))
            }
            _ if bytes == 8 => Ok(Op::MovD(self.d(0)?, self.sd(1)?)),
            _ => Ok(Op::MovW(self.w(0)?, self.sw(1)?)),
        }
    }

    fn two(&self) -> Result<Op> {
        let kind = self.kind()?;
        let mode = self.mode();
        let int = match self.name {
            "add" => Int2::Add,
            "sub" => Int2::Sub,
            "min" => Int2::Min,
            "max" => Int2::Max,
            "div" => Int2::Div,
            "rem" => Int2::Rem,
            "and" => Int2::And,
            "or" => Int2::Or,
            "xor" => Int2::Xor,
            "shl" => Int2::Shl,
            _ => Int2::Shr,
        };
        let float = || {
            self.ignore(&["rn", "full", "approx"]);
            Ok(match int {
                Int2::Add => Float2::Add,
                Int2::Sub => Float2::Sub,
                Int2::Div => Float2::Div,
                Int2::Min if self.has("NaN") => Float2::MinNan,
                Int2::Max if self.has("NaN") => Float2::MaxNan,
                Int2::Min => Float2::Min,
                Int2::Max => Float2::Max,
                Int2::MulLo | Int2::MulHi | Int2::Rem | Int2::MinRelu | Int2::MaxRelu | Int2::And | Int2::Or | Int2::Xor | Int2::Shl | Int2::Shr => {
                    return self.unsupported();
                }
            })
        };
        Ok(match kind {
            NumberType::Int(_) if mode.saturate => return self.unsupported(),
            NumberType::Int(Ty::S32) if matches!(int, Int2::Min | Int2::Max) && self.has("relu") => {
                let relu = if int == Int2::Min { Int2::MinRelu } else { Int2::MaxRelu };
                Op::IntW(relu, Ty::S32, self.w(0)?, self.sw(1)?, self.sw(2)?)
            }
            NumberType::Int(t) if t.bytes() == 8 && matches!(int, Int2::Shl | Int2::Shr) => Op::ShiftD(int, t, self.d(0)?, self.sd(1)?, self.sw(2)?),
            NumberType::Int(t) if t.bytes() == 8 => Op::IntD(int, t, self.d(0)?, self.sd(1)?, self.sd(2)?),
            NumberType::Int(t) => Op::IntW(int, t, self.w(0)?, self.sw(1)?, self.sw(2)?),
            NumberType::F32 => Op::F2(float()?, mode, self.w(0)?, self.sw(1)?, self.sw(2)?),
            NumberType::F64 => Op::D2(float()?, self.d(0)?, self.sd(1)?, self.sd(2)?),
            NumberType::Half(e, n) => Op::H2(float()?, e, n, self.w(0)?, self.sw(1)?, self.sw(2)?),
            NumberType::Predicate => {
                let logic = match int {
                    Int2::And => Logic::And,
                    Int2::Or => Logic::Or,
                    Int2::Xor => Logic::Xor,
                    _ => return self.unsupported(),
                };
                Op::LogicP(logic, self.p(0)?, self.sp(1)?, self.sp(2)?)
            }
        })
    }

    fn mul(&self) -> Result<Op> {
        let (wide, high) = (self.has("wide"), self.has("hi"));
        self.ignore(&["lo"]);
        let kind = self.kind()?;
        let mode = self.mode();
        let which = if high { Int2::MulHi } else { Int2::MulLo };
        Ok(match kind {
            NumberType::Int(t) if wide && t.bytes() == 4 => Op::WideD(t, self.d(0)?, self.sw(1)?, self.sw(2)?, None),
            NumberType::Int(t) if wide && t.bytes() == 2 => Op::WideW(t, self.w(0)?, self.sw(1)?, self.sw(2)?, None),
            NumberType::Int(t) if t.bytes() == 8 => Op::IntD(which, t, self.d(0)?, self.sd(1)?, self.sd(2)?),
            NumberType::Int(t) => Op::IntW(which, t, self.w(0)?, self.sw(1)?, self.sw(2)?),
            NumberType::F32 => {
                self.ignore(&["rn"]);
                Op::F2(Float2::Mul, mode, self.w(0)?, self.sw(1)?, self.sw(2)?)
            }
            NumberType::F64 => {
                self.ignore(&["rn"]);
                Op::D2(Float2::Mul, self.d(0)?, self.sd(1)?, self.sd(2)?)
            }
            NumberType::Half(e, n) => {
                self.ignore(&["rn"]);
                Op::H2(Float2::Mul, e, n, self.w(0)?, self.sw(1)?, self.sw(2)?)
            }
            NumberType::Predicate => return self.unsupported(),
        })
    }

    fn mad(&self) -> Result<Op> {
        let wide = self.has("wide");
        self.ignore(&["lo", "rn"]);
        let kind = self.kind()?;
        let mode = self.mode();
        Ok(match kind {
            NumberType::Int(t) if wide && t.bytes() == 4 => Op::WideD(t, self.d(0)?, self.sw(1)?, self.sw(2)?, Some(self.sd(3)?)),
            NumberType::Int(t) if wide && t.bytes() == 2 => Op::WideW(t, self.w(0)?, self.sw(1)?, self.sw(2)?, Some(self.sw(3)?)),
            NumberType::Int(t) if t.bytes() == 8 => Op::MadD(self.d(0)?, self.sd(1)?, self.sd(2)?, self.sd(3)?),
            NumberType::Int(t) => Op::MadW(t, self.w(0)?, self.sw(1)?, self.sw(2)?, self.sw(3)?),
            NumberType::F32 => Op::Fma(mode, self.w(0)?, self.sw(1)?, self.sw(2)?, self.sw(3)?),
            NumberType::F64 => Op::DFma(self.d(0)?, self.sd(1)?, self.sd(2)?, self.sd(3)?),
            NumberType::Half(e, n) => Op::HFma(e, n, self.w(0)?, self.sw(1)?, self.sw(2)?, self.sw(3)?),
            NumberType::Predicate => return self.unsupported(),
        })
    }

    fn one(&self) -> Result<Op> {
        let kind = self.kind()?;
        let mode = self.mode();
        let float = || {
            self.ignore(&["approx", "rn"]);
            Ok(match self.name {
                "neg" => Float1::Neg,
                "abs" => Float1::Abs,
                "sqrt" => Float1::Sqrt,
                "rcp" => Float1::Rcp,
                "rsqrt" => Float1::Rsqrt,
                "ex2" => Float1::Ex2,
                "lg2" => Float1::Lg2,
                "sin" => Float1::Sin,
                "cos" => Float1::Cos,
                "tanh" => Float1::Tanh,
                _ => return self.unsupported(),
            })
        };
        let int = || {
            Ok(match self.name {
                "neg" => Int1::Neg,
                "not" => Int1::Not,
                "abs" => Int1::Abs,
                "popc" => Int1::Popc,
                "clz" => Int1::Clz,
                "brev" => Int1::Brev,
                _ => return self.unsupported(),
            })
        };
        Ok(match kind {
            NumberType::Int(t) if t.bytes() == 8 => match int()? {
                i @ (Int1::Popc | Int1::Clz) => Op::CountD(i, self.w(0)?, self.sd(1)?),
                i => Op::Int1D(i, t, self.d(0)?, self.sd(1)?),
            },
            NumberType::Int(t) => Op::Int1W(int()?, t, self.w(0)?, self.sw(1)?),
            NumberType::F32 => Op::F1(float()?, mode, self.w(0)?, self.sw(1)?),
            NumberType::F64 => Op::D1(float()?, self.d(0)?, self.sd(1)?),
            NumberType::Half(e, n) => Op::H1(float()?, e, n, self.w(0)?, self.sw(1)?),
            NumberType::Predicate if self.name == "not" => {
                let flipped = match self.sp(1)? {
                    Sp::Reg(p, negated) => Sp::Reg(p, !negated),
                    Sp::Const(b) => Sp::Const(!b),
                };
                Op::MovP(self.p(0)?, flipped)
            }
            NumberType::Predicate => return self.unsupported(),
        })
    }

    fn setp(&self) -> Result<Op> {
        let compare = |m: &str| {
            Some(match m {
                "eq" => (Cmp::Eq, false),
                "ne" => (Cmp::Ne, false),
                "lt" | "lo" => (Cmp::Lt, false),
                "le" | "ls" => (Cmp::Le, false),
                "gt" | "hi" => (Cmp::Gt, false),
                "ge" | "hs" => (Cmp::Ge, false),
                "equ" => (Cmp::Eq, true),
                "neu" => (Cmp::Ne, true),
                "ltu" => (Cmp::Lt, true),
                "leu" => (Cmp::Le, true),
                "gtu" => (Cmp::Gt, true),
                "geu" => (Cmp::Ge, true),
                "num" => (Cmp::Num, false),
                "nan" => (Cmp::Nan, true),
                _ => return None,
            })
        };
        let (cmp, unordered) = self.find(compare).ok_or_else(|| self.error("`setp` without a comparison that is supported"))?;
        let logic = self.find(|m| match m {
            "and" => Some(Logic::And),
            "or" => Some(Logic::Or),
            "xor" => Some(Logic::Xor),
            _ => None,
        });
        self.ignore(&["ftz"]);
        let ty = self.ty()?;
        let (d, inverse) = match self.operand(0)? {
            Operand::Pair(d, q) => {
                let of = |name: &String| if name == "_" { Ok(None) } else { self.predicate_named(name).map(Some) };
                (of(d)?, of(q)?)
            }
            _ => (Some(self.p(0)?), None),
        };
        let and = logic.map(|l| self.sp(3).map(|p| (l, p))).transpose()?;
        Ok(Op::SetP { cmp, ty, unordered, d, inverse, a: self.src(1, ty)?, b: self.src(2, ty)?, and })
    }

    fn convert(&self) -> Result<Op> {
        let rounds = |m: &str| {
            Some(match m {
                "rn" => (Round::Nearest, false),
                "rz" => (Round::Zero, false),
                "rm" => (Round::Down, false),
                "rp" => (Round::Up, false),
                "rni" => (Round::Nearest, true),
                "rzi" => (Round::Zero, true),
                "rmi" => (Round::Down, true),
                "rpi" => (Round::Up, true),
                _ => return None,
            })
        };
        if self.has("tf32") {
            if !self.has("rna") || !self.has("f32") {
                return self.unsupported();
            }
            return Ok(Op::F1(Float1::Tf32, Mode::default(), self.w(0)?, self.sw(1)?));
        }
        let (round, integral) = self.find(rounds).unwrap_or((Round::Nearest, false));
        let mode = self.mode();
        if let Some(to) = self.find(packed) {
            let relu = self.has("relu");
            if !self.has("f32") || round != Round::Nearest {
                return self.unsupported();
            }
            return Ok(Op::ConvertPair { to, relu, d: self.w(0)?, high: self.sw(1)?, low: self.sw(2)? });
        }
        let to = self.find(ty).ok_or_else(|| self.error("`cvt` to a type that is not supported"))?;
        let from = self.ty()?;
        // Other roundings than to nearest are supported only where the result is an integer.
        if to.is_float() && !integral && round != Round::Nearest || integral && to.is_float() && from != to {
            return self.unsupported();
        }
        Ok(Op::Convert { from, to, round, integral, mode, d: self.reg(0)?, a: self.src(1, from)? })
    }
}
