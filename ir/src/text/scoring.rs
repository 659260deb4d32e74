//! Programs of scores in text: `[i32.1, i32.2, ge 0 1] seen 2`.
//!
//! A step is `product` (the score), the type and the number of a further operand (`i32.1`), the type and the
//! value of a constant (`i32 7.0`), or an op and the steps that its operands are, by their numbers from 0 (`ge 0
//! 1`, `cast.f32 2`).

use super::io::{Io, Result};
use crate::op::{Binary, Compare, DType, Op, Real, Scoring, Step, Unary};

/// ` steps [..] score 4 seen 2 weight 7`; nothing of a plain one.
pub(super) fn scoring(io: &mut Io, s: &mut Scoring) -> Result {
    let mut types: Vec<DType> = vec![];
    let mut steps = (!s.steps.is_empty()).then(|| std::mem::take(&mut s.steps));
    io.option(&mut steps, vec![], " steps ", |io, steps| {
        io.as_text(steps, |io, steps| {
            let blank = Step { op: Op::Input(0), dtype: DType::F32, args: vec![] };
            io.list(steps, blank, |io, s| {
                step(io, s, &types)?;
                types.push(s.dtype);
                Ok(())
            })
        })
    })?;
    s.steps = steps.unwrap_or_default();
    io.option(&mut s.score, 0, " score ", Io::number)?;
    io.option(&mut s.seen, 0, " seen ", Io::number)?;
    io.option(&mut s.weight, 0, " weight ", Io::number)
}

const TYPES: [DType; 5] = [DType::F32, DType::Bf16, DType::F16, DType::I32, DType::Bool];

fn step(io: &mut Io, s: &mut Step, types: &[DType]) -> Result {
    if !io.reading() {
        let name = s.dtype.name();
        match &s.op {
            Op::Input(0) => io.put("product"),
            Op::Input(n) => io.put(format_args!("{name}.{n}")),
            Op::Const(x) => io.put(format_args!("{name} {x}")),
            Op::Cast => io.put(format_args!("cast.{name}")),
            op => io.put(op.name()),
        }
        s.args.iter().for_each(|a| io.put(format_args!(" {a}")));
        return Ok(());
    }
    let mark = io.mark();
    let word = io.word("a step of a program of scores")?;
    let named = |name: &str| TYPES.into_iter().find(|t| t.name() == name);
    if let Some(dtype) = named(word) {
        let mut x = 0.0;
        io.real(&mut x)?;
        *s = Step { op: Op::Const(Real(x)), dtype, args: vec![] };
        return Ok(());
    }
    if let Some((name, number)) = word.split_once('.')
        && let (Some(dtype), Ok(n)) = (named(name), number.parse::<u32>())
        && n > 0
    {
        *s = Step { op: Op::Input(n), dtype, args: vec![] };
        return Ok(());
    }
    let cast = word.strip_prefix("cast.").and_then(named);
    s.op = match word {
        "product" => Op::Input(0),
        _ if cast.is_some() => Op::Cast,
        "select" => Op::Select,
        "add" => Op::Add,
        "stop_gradient" => Op::StopGradient,
        _ => {
            let op =
                Unary::parse(word).map(Op::Unary).or_else(|| Binary::parse(word).map(Op::Binary)).or_else(|| Compare::parse(word).map(Op::Compare));
            match op {
                Some(op) => op,
                None => return io.wrong(mark, format!("no step is called `{word}`")),
            }
        }
    };
    s.args = vec![];
    while io.rest().starts_with(|c: char| c.is_ascii_digit()) {
        let (mark, mut at) = (io.mark(), 0u32);
        io.number(&mut at)?;
        if at as usize >= types.len() {
            return io.wrong(mark, format!("step {at} does not come before this one"));
        }
        s.args.push(at);
    }
    if let Some(why) = s.op.arity().refuses(s.args.len()).filter(|_| s.op != Op::Input(0)) {
        return io.wrong(mark, format!("`{word}` {why}"));
    }
    let of = |k: usize| s.args.get(k).map_or(DType::F32, |a| types[*a as usize]);
    s.dtype = match s.op {
        Op::Compare(_) => DType::Bool,
        Op::Select => of(1),
        Op::Cast => cast.unwrap_or(DType::F32),
        _ => of(0),
    };
    Ok(())
}
