//! The ops in text: one table for the printer, the parser and the MLIR export.

use super::io::{Io, Result};
use super::labels::Labels;
use super::scoring::scoring;
use super::tokens::label;
use crate::dim::{Base, Dim, IndexMap, Linear, Order};
use crate::graph::{Node, Value};
use crate::mesh::{Mesh, SubAxis};
use crate::op::{Attention, AttentionGrad, Binary, Channel, Collective, Compare, Op, Real, Reduce, Reshard, Routing, Scalar, Scoring, Unary};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::LazyLock;

/// An op of the language's table: what it is called, a blank one for each name, and the form of its fields.
macro_rules! ops {
    ($io:ident; $($pattern:pat, $blanks:expr => $form:expr;)*) => {
        /// A blank op of every name.
        pub(super) fn blanks() -> Vec<Op> {
            let mut all: Vec<Op> = vec![];
            $(all.extend($blanks);)*
            all
        }

        /// The text of an op's fields, which follows its operands.
        fn fields($io: &mut Io, op: &mut Op) -> Result {
            match op {
                $($pattern => $form,)*
            }
        }
    };
}

/// ` hops -1 channel 0`.
pub(super) fn route(io: &mut Io, hops: &mut i64, channel: &mut Channel) -> Result {
    io.with(" hops ", hops, Io::number)?;
    io.with(" channel ", &mut channel.0, Io::number)
}

/// An op per value of an enum.
fn each<T: Copy>(all: &[T], op: impl Fn(T) -> Op) -> Vec<Op> {
    all.iter().map(|x| op(*x)).collect()
}

const D: Dim = Dim(0);
const ROUTING: Routing = Routing { experts: D, choice: D };
const ATTENTION: Attention = Attention { at: D, keys: D, d: D, values: D, scale: Real(0.0), scoring: Scoring::PLAIN };

ops! { io;
    Op::Input(i), [Op::Input(0)] => io.with(" ", i, |io, i| io.hinted(i, |h| &h.inputs));
    Op::Param(p), [Op::Param(0)] => io.with(" ", p, |io, p| io.hinted(p, |h| &h.params));
    Op::State(p, slot), [Op::State(0, 0)] => {
        io.with(" ", p, |io, p| io.hinted(p, |h| &h.params))?;
        io.with(" slot ", slot, Io::number)
    };
    Op::Table(t), [Op::Table(0)] => io.with(" ", t, |io, t| io.hinted(t, |h| &h.tables));
    Op::Const(x), [Op::Const(Real(0.0))] => io.with(" ", &mut x.0, Io::real);
    Op::Iota(d), [Op::Iota(D)] => io.with(" ", d, dim);
    Op::Uniform { key }, [Op::Uniform { key: 0 }] => io.with(" key ", key, Io::number);
    Op::Scalar(s), [Op::Scalar(Scalar::Step)] => io.with(" ", s, |io, s| io.as_text(s, scalar));
    Op::Unary(_), each(Unary::ALL, Op::Unary) => Ok(());
    Op::Binary(_), each(Binary::ALL, Op::Binary) => Ok(());
    Op::Compare(_), each(Compare::ALL, Op::Compare) => Ok(());
    Op::Select, [Op::Select] => Ok(());
    Op::Add, [Op::Add] => Ok(());
    Op::Cast, [Op::Cast] => Ok(());
    Op::StopGradient, [Op::StopGradient] => Ok(());
    Op::Cut, [Op::Cut] => Ok(());
    Op::Expand, [Op::Expand] => Ok(());
    Op::View { from, to }, [Op::View { from: vec![], to: vec![] }] => {
        io.with(" ", from, dims)?;
        io.with(" -> ", to, dims)
    };
    Op::Slice { from, to, at }, [Op::Slice { from: D, to: None, at: 0 }] => {
        io.with(" from ", from, dim)?;
        io.option(to, D, " to ", dim)?;
        io.with(" at ", at, Io::number)
    };
    Op::Pad { from, to, at }, [Op::Pad { from: None, to: D, at: 0 }] => {
        io.option(from, D, " from ", dim)?;
        io.with(" to ", to, dim)?;
        io.with(" at ", at, Io::number)
    };
    Op::Concat { from, to }, [Op::Concat { from: vec![], to: D }] => {
        io.with(" ", from, dims)?;
        io.with(" -> ", to, dim)
    };
    Op::Shard { from, to, index: map }, [Op::Shard { from: D, to: D, index: IndexMap { parts: vec![], base: Base::Zero } }] => {
        io.with(" from ", from, dim)?;
        io.with(" to ", to, dim)?;
        io.with(" index ", map, |io, map| io.as_text(map, index))
    };
    Op::Reshard { kind: _, subs }, each(Reshard::ALL, |kind| Op::Reshard { kind, subs: vec![] }) => io.with(" over ", subs, sub_axes);
    Op::Collective { kind: _, subs, stages, part }, collectives().map(|kind| Op::Collective { kind, subs: vec![], stages: None, part: None }) => {
        io.with(" over ", subs, sub_axes)?;
        io.option(stages, vec![], " stages ", |io, s| io.list(s, 0, Io::number))?;
        io.option(part, D, " part ", dim)
    };
    Op::Recv { hops, channel }, [Op::Recv { hops: 0, channel: Channel(0) }] => route(io, hops, channel);
    Op::Send { hops, channel }, [Op::Send { hops: 0, channel: Channel(0) }] => route(io, hops, channel);
    Op::Limit { most }, [Op::Limit { most: 0 }] => io.with(" to ", most, Io::number);
    Op::Dot { over, tf32 }, [Op::dot(vec![])] => {
        io.with(" over ", over, dims)?;
        io.flag(tf32, " tf32")
    };
    Op::GroupedDot { rows, experts, over, tf32 }, [Op::grouped_dot(D, D, vec![])] => {
        io.with(" rows ", rows, dim)?;
        io.with(" experts ", experts, dim)?;
        io.with(" over ", over, dims)?;
        io.flag(tf32, " tf32")
    };
    Op::Reduce { kind: _, over }, each(Reduce::ALL, |kind| Op::Reduce { kind, over: vec![] }) => io.with(" over ", over, dims);
    Op::ArgMax { over }, [Op::ArgMax { over: D }] => io.with(" over ", over, dim);
    Op::Cumsum { over, reverse }, [Op::Cumsum { over: D, reverse: false }] => {
        io.with(" over ", over, dim)?;
        io.flag(reverse, " reverse")
    };
    Op::Gather { dim: d }, [Op::Gather { dim: D }] => io.with(" along ", d, dim);
    Op::Scatter { dim: d }, [Op::Scatter { dim: D }] => io.with(" along ", d, dim);
    Op::Dispatch(r), [Op::Dispatch(ROUTING)] => routing(io, r);
    Op::Combine(r), [Op::Combine(ROUTING)] => routing(io, r);
    Op::Attention(a), [Op::Attention(ATTENTION)] => attention(io, a);
    Op::AttentionLse(a), [Op::AttentionLse(ATTENTION)] => attention(io, a);
    Op::AttentionGrad(a, _), each(AttentionGrad::ALL, |which| Op::AttentionGrad(ATTENTION, which)) => attention(io, a);
}

fn collectives() -> impl Iterator<Item = Collective> {
    let reducing = Reduce::ALL.iter().flat_map(|r| [Collective::AllReduce(*r), Collective::ReduceScatter(*r)]);
    reducing.chain([Collective::AllGather, Collective::AllToAll, Collective::Shift])
}

/// `all_reduce.sum`.
pub(super) fn collective_name(kind: Collective) -> String {
    match kind {
        Collective::AllReduce(r) | Collective::ReduceScatter(r) => format!("{}.{}", kind.name(), r.name()),
        Collective::AllGather | Collective::AllToAll | Collective::Shift => kind.name().into(),
    }
}

pub(super) fn blank_collective() -> Collective {
    Collective::AllGather
}

pub(super) fn collective_kind(io: &mut Io, kind: &mut Collective) -> Result {
    if !io.reading() {
        return io.lit(&collective_name(*kind));
    }
    let mark = io.mark();
    let word = io.word("a collective")?;
    match collectives().find(|c| collective_name(*c) == word) {
        Some(c) => *kind = c,
        None => return io.wrong(mark, format!("no collective is called `{word}`")),
    }
    Ok(())
}

/// The name of an op, unique: a reshard is `reshard.all_gather`, a collective `all_gather` or `all_reduce.sum`.
pub(super) fn op_name(op: &Op) -> String {
    match op {
        Op::Reshard { kind, .. } => format!("reshard.{}", kind.name()),
        Op::Collective { kind, .. } => collective_name(*kind),
        other => other.name().into(),
    }
}

/// `dot %3, %4 over [hidden]`: the op and the operands of a node.
pub(super) fn op(io: &mut Io, node: &mut Node) -> Result {
    static NAMES: LazyLock<HashMap<String, Op>> = LazyLock::new(|| blanks().into_iter().map(|op| (op_name(&op), op)).collect());
    if io.reading() {
        let mark = io.mark();
        let name = io.word("an op")?;
        match NAMES.get(name) {
            Some(blank) => node.op = blank.clone(),
            None => return io.wrong(mark, format!("no op is called `{name}`")),
        }
    } else {
        io.lit(&op_name(&node.op))?;
    }
    args(io, &mut node.args)?;
    fields(io, &mut node.op)
}

/// Operands, to the first thing that is none.
fn args(io: &mut Io, args: &mut Vec<Value>) -> Result {
    for i in 0.. {
        if i > 0 {
            if !io.opt(i < args.len(), ", ") {
                break;
            }
        } else if !io.value_follows(!args.is_empty()) {
            break;
        } else {
            io.opt(true, " ");
        }
        if io.reading() {
            args.push(Value(0));
        }
        io.value(&mut args[i])?;
    }
    Ok(())
}

/// The fields of an op as MLIR attributes, `over = ["hidden"]`.
pub(super) fn attributes(op: &Op, dims: &Rc<Labels>, mesh: &Mesh) -> String {
    super::io::attributes(op, dims, mesh, fields)
}

pub(super) fn dim(io: &mut Io, d: &mut Dim) -> Result {
    io.as_text(&mut d.0, |io, d| label(io, |io| &io.dims, "dim", d))
}

fn sub_axes(io: &mut Io, subs: &mut Vec<SubAxis>) -> Result {
    io.as_text(subs, Io::subs)
}

/// `[seq, keys#1]`.
pub(super) fn dims(io: &mut Io, ds: &mut Vec<Dim>) -> Result {
    io.list(ds, D, dim)
}

fn routing(io: &mut Io, r: &mut Routing) -> Result {
    io.with(" experts ", &mut r.experts, dim)?;
    io.with(" choice ", &mut r.choice, dim)
}

fn attention(io: &mut Io, a: &mut Attention) -> Result {
    io.with(" at ", &mut a.at, dim)?;
    io.with(" keys ", &mut a.keys, dim)?;
    io.with(" d ", &mut a.d, dim)?;
    let mut values = (!io.reading() && a.values != a.d).then_some(a.values);
    io.option(&mut values, D, " values ", dim)?;
    a.values = values.unwrap_or(a.d);
    io.with(" scale ", &mut a.scale.0, Io::real)?;
    scoring(io, &mut a.scoring)
}

pub(super) fn scalar(io: &mut Io, s: &mut Scalar) -> Result {
    let all = [
        ("learning_rate", Scalar::LearningRate),
        ("loss_scale", Scalar::LossScale),
        ("step", Scalar::Step),
        ("seed", Scalar::Seed),
        ("bias_correction", Scalar::BiasCorrection(Real(0.0))),
        ("linear", Scalar::Linear(vec![])),
        ("slot", Scalar::Slot(0)),
    ];
    io.variant(s, "a scalar", &all)?;
    match s {
        Scalar::LearningRate | Scalar::LossScale | Scalar::Step | Scalar::Seed => Ok(()),
        Scalar::BiasCorrection(beta) => io.with(" ", &mut beta.0, Io::real),
        Scalar::Linear(form) => io.with(" ", form, linear),
        Scalar::Slot(i) => io.with(" ", i, Io::number),
    }
}

/// `64*tp.0 + 8*dp`; `0`.
pub(super) fn linear(io: &mut Io, form: &mut Linear) -> Result {
    for i in 0.. {
        if i > 0 && !io.opt(i < form.len(), " + ") {
            break;
        }
        let mark = io.mark();
        let mut term = form.get(i).copied().unwrap_or((SubAxis(0), 0));
        io.number(&mut term.1)?;
        if !io.opt(!form.is_empty(), "*") {
            return if i == 0 && term.1 == 0 { Ok(()) } else { io.wrong(mark, "expected `stride*axis`") };
        }
        io.sub(&mut term.0)?;
        if io.reading() {
            form.push(term);
        }
    }
    Ok(())
}

/// `4 of 32`: pairs of chunks, and elements of a chunk.
pub(super) fn zig_zag(io: &mut Io, order: &mut Order) -> Result {
    let (mut pairs, mut chunk) = match *order {
        Order::Plain => (0, 0),
        Order::ZigZag { pairs, chunk } => (pairs, chunk),
    };
    io.number(&mut pairs)?;
    io.with(" of ", &mut chunk, Io::number)?;
    *order = Order::ZigZag { pairs, chunk };
    Ok(())
}

/// `[4 by 16, 8] + 32*tp.0`: extents and, unless 1, strides; then the base.
pub(super) fn index(io: &mut Io, map: &mut IndexMap) -> Result {
    io.list(&mut map.parts, (0, 1), |io, (extent, stride)| {
        io.number(extent)?;
        io.or(stride, 1, " by ", Io::number)
    })?;
    if !io.opt(map.base != Base::Zero, " + ") {
        return Ok(());
    }
    if io.opt(matches!(map.base, Base::Slot(_)), "slot ") {
        let mut slot = if let Base::Slot(i) = map.base { i } else { 0 };
        io.number(&mut slot)?;
        map.base = Base::Slot(slot);
        return Ok(());
    }
    let mut form = if let Base::Coords(form) = &map.base { form.clone() } else { vec![] };
    linear(io, &mut form)?;
    map.base = Base::Coords(form);
    Ok(())
}
