//! Static arithmetic: checked integers, reals, comparisons.

use super::Elab;
use super::value::Val;
use crate::ast::BinaryOp;
use ir::diag::{Diagnostic, Span};

/// A static number.
#[derive(Clone, Copy)]
enum Num {
    Int(i64),
    Real(f64),
}

impl Num {
    fn real(self) -> f64 {
        match self {
            Num::Int(n) => n as f64,
            Num::Real(x) => x,
        }
    }
}

/// The spans of an operation and its operands, with the operands' texts for messages.
pub struct OperandSpans {
    pub op: Span,
    pub left: Span,
    pub right: Span,
    pub left_text: String,
    pub right_text: String,
}

impl Elab<'_> {
    /// A static number as a real.
    pub fn real(&self, val: &Val) -> Option<f64> {
        self.num(val).map(Num::real)
    }

    /// A static integer or the size of a dim.
    pub fn int(&self, val: &Val) -> Option<i64> {
        match self.num(val)? {
            Num::Int(n) => Some(n),
            Num::Real(_) => None,
        }
    }

    fn num(&self, val: &Val) -> Option<Num> {
        match val {
            Val::Int(n) => Some(Num::Int(*n)),
            Val::Real(x) => Some(Num::Real(*x)),
            Val::Dim(d) => self.dims[d.0].size.map(Num::Int),
            Val::Bad | Val::None | Val::Bool(_) | Val::Text(_) | Val::Reals(_) | Val::Dims(_) | Val::Tensor(_) | Val::Tuple(_) => None,
        }
    }

    /// Arithmetic of two static numbers; none if one of them is not a number.
    pub fn static_arithmetic(&mut self, op: BinaryOp, a: &Val, b: &Val, at: &OperandSpans) -> Option<Val> {
        let (x, y) = (self.num(a)?, self.num(b)?);
        Some(match (x, y) {
            (Num::Int(x), Num::Int(y)) => self.int_arithmetic(op, x, y, at),
            (x, y) => {
                let (x, y) = (x.real(), y.real());
                let result = match op {
                    BinaryOp::Add => x + y,
                    BinaryOp::Sub => x - y,
                    BinaryOp::Mul => x * y,
                    BinaryOp::Div => x / y,
                    BinaryOp::Rem => x - (x / y).floor() * y,
                    _ => x.powf(y),
                };
                self.finite(result, x.is_finite() && y.is_finite(), op, at, &format!("{x}"), &format!("{y}"))
            }
        })
    }

    fn int_arithmetic(&mut self, op: BinaryOp, x: i64, y: i64, at: &OperandSpans) -> Val {
        let named = |text: &str, n: i64| if text == n.to_string() { text.to_string() } else { format!("{text} = {n}") };
        let zero = |elab: &mut Self| {
            let e = Diagnostic::error("E0303", format!("{} is divided by {}", named(&at.left_text, x), named(&at.right_text, 0)));
            elab.fail(e.label(at.op, "division by zero").label(at.right, "is 0"))
        };
        let result = match op {
            BinaryOp::Add => x.checked_add(y),
            BinaryOp::Sub => x.checked_sub(y),
            BinaryOp::Mul => x.checked_mul(y),
            BinaryOp::Div => {
                if y == 0 {
                    return zero(self);
                }
                if x.checked_rem(y).is_some_and(|r| r != 0) {
                    let (l, r) = (&at.left_text, &at.right_text);
                    let e = Diagnostic::error("E0301", format!("{} does not divide {}", named(r, y), named(l, x)));
                    let e = e.label(at.op, format!("{x} / {y} is not an integer"));
                    let divisors = divisors(x);
                    let e = match divisors.is_empty() {
                        true => e,
                        false => e.help(format!("{x} divides by {}", divisors.iter().map(i64::to_string).collect::<Vec<_>>().join(", "))),
                    };
                    return self.fail(e.help(format!("`1.0 * {l} / {r}` is real division")));
                }
                x.checked_div(y)
            }
            BinaryOp::Rem => {
                if y == 0 {
                    return zero(self);
                }
                x.checked_rem_euclid(y).map(|r| if r != 0 && y < 0 { r + y } else { r })
            }
            _ => match u32::try_from(y) {
                Ok(y) => x.checked_pow(y),
                Err(_) if y > 0 => None,
                Err(_) => return self.finite((x as f64).powf(y as f64), true, op, at, &x.to_string(), &y.to_string()),
            },
        };
        match result {
            Some(n) => Val::Int(n),
            None => self.overflow(op, at, &x.to_string(), &y.to_string()),
        }
    }

    fn finite(&mut self, result: f64, were_finite: bool, op: BinaryOp, at: &OperandSpans, x: &str, y: &str) -> Val {
        if result.is_nan() {
            let e = Diagnostic::error("E0304", format!("{x} {} {y} is not a number", op.symbol())).label(at.op, "undefined");
            return self.fail(e);
        }
        if result.is_infinite() && were_finite {
            if op == BinaryOp::Div {
                let e = Diagnostic::error("E0303", format!("{x} is divided by {} = 0", at.right_text));
                return self.fail(e.label(at.op, "division by zero"));
            }
            return self.overflow(op, at, x, y);
        }
        Val::Real(result)
    }

    fn overflow(&mut self, op: BinaryOp, at: &OperandSpans, x: &str, y: &str) -> Val {
        let e = Diagnostic::error("E0302", format!("{x} {} {y} is too large", op.symbol())).label(at.op, "overflows");
        self.fail(e.note(format!("integers reach {}", i64::MAX)).help("compute with reals (`1.0 * ..`), or use smaller sizes"))
    }

    /// Comparison of two static values; none if they are not both static.
    pub fn static_compare(&mut self, op: BinaryOp, a: &Val, b: &Val, at: &OperandSpans) -> Option<Val> {
        let equality = match op {
            BinaryOp::Eq => Some(true),
            BinaryOp::Ne => Some(false),
            _ => None,
        };
        if let (Val::Dim(x), Val::Dim(y), Some(positive)) = (a, b, equality) {
            return Some(Val::Bool((self.dims[x.0].size == self.dims[y.0].size) == positive));
        }
        if let (Some(x), Some(y)) = (self.num(a), self.num(b)) {
            let order = match (x, y) {
                (Num::Int(x), Num::Int(y)) => Some(x.cmp(&y)),
                (x, y) => x.real().partial_cmp(&y.real()),
            };
            return Some(Val::Bool(match op {
                BinaryOp::Eq => order.is_some_and(std::cmp::Ordering::is_eq),
                BinaryOp::Ne => order.is_none_or(std::cmp::Ordering::is_ne),
                BinaryOp::Lt => order.is_some_and(std::cmp::Ordering::is_lt),
                BinaryOp::Le => order.is_some_and(std::cmp::Ordering::is_le),
                BinaryOp::Gt => order.is_some_and(std::cmp::Ordering::is_gt),
                _ => order.is_some_and(std::cmp::Ordering::is_ge),
            }));
        }
        let equal = match (a, b) {
            (Val::None, Val::None) => true,
            (Val::None, _) | (_, Val::None) => false,
            (Val::Text(x), Val::Text(y)) => x == y,
            (Val::Bool(x), Val::Bool(y)) => x == y,
            (Val::Dims(x), Val::Dims(y)) => x == y,
            (Val::Reals(x), Val::Reals(y)) => x == y,
            (Val::Reals(_), Val::Dims(none)) | (Val::Dims(none), Val::Reals(_)) if none.is_empty() => false,
            (Val::Tensor(_), _) | (_, Val::Tensor(_)) => return None,
            _ => {
                let e = Diagnostic::error("E0202", format!("{} is compared with {}", a.kind(), b.kind()));
                let e = e.label(at.op, "never equal").label(at.left, a.kind()).label(at.right, b.kind());
                return Some(self.fail(e));
            }
        };
        match equality {
            Some(positive) => Some(Val::Bool(equal == positive)),
            None => {
                let e = Diagnostic::error("E0202", format!("{} and {} have no order", a.kind(), b.kind())).label(at.op, "compares sizes");
                Some(self.fail(e.help("only `==` and `!=` work here")))
            }
        }
    }
}

/// All positive divisors of a number if they are few, else the smallest dozen.
fn divisors(n: i64) -> Vec<i64> {
    let n = n.unsigned_abs();
    if n == 0 {
        return vec![];
    }
    let small: Vec<u64> = (1..=n.min(10_000)).take_while(|d| d * d <= n).filter(|d| n.is_multiple_of(*d)).collect();
    let mut all: Vec<u64> = small.iter().copied().chain(small.iter().map(|d| n / d)).collect();
    all.sort_unstable();
    all.dedup();
    all.truncate(12);
    all.into_iter().filter_map(|d| i64::try_from(d).ok()).collect()
}
