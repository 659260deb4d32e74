//! Tables of rows: i32, from what is chosen, exact whatever it is.

use super::super::emit::Emitter;
use super::{RowContext, RowDim, RowSharding, there};
use ir::dim::Dim;
use ir::graph::{Type, Value};
use ir::local::Chunk;
use ir::mesh::SubAxis;
use ir::op::{Binary, Collective, Compare, DType, Op, Reduce};
use ir::reason::{AvoidedBy, Reason};

/// What all passes of a layout share at home.
#[derive(Clone, Copy)]
pub(super) struct Sorted {
    /// The chosen experts: `[token, choice]`.
    chosen: Value,
    /// Whether a token chooses an expert: `[expert, token]`.
    hit: Value,
    /// The number of such a pair in its group, from 1.
    rank: Value,
    /// Where the rows of a group's experts end, over all passes: `[groups.., group]`.
    ends: Value,
}

/// The tables of a layout at home, for the slots of a pass.
#[derive(Clone, Copy)]
pub(super) struct HomeTables {
    /// The slot of a choice, -1 if it has none: `[token, choice]`, a number along all slots.
    pub slot_of: Value,
    /// The number of choices that name a slot's expert: `[slots]`.
    pub count: Value,
    /// The token of a slot, -1 if nobody's: `[groups.., slot]`.
    pub token: Value,
    /// Where the rows of a group's experts end: `[groups.., group]`.
    pub ends: Value,
}

/// A table of slots wherever rows are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum SlotTable {
    /// The token in its home; -1 in slots that are nobody's, as in the next two.
    Token,
    /// The expert in its group.
    Expert,
    /// The two together: `token * experts of a group + expert`.
    Place,
    /// Where experts' rows end; per group, not per slot.
    Ends,
}

impl Emitter<'_> {
    /// A counting sort of a layout's choices by expert and token.
    fn sorted(&mut self, layout: usize, chunk: Chunk) -> Sorted {
        if let Some(sorted) = there(self.rows.sorted.get(&layout), chunk) {
            return sorted;
        }
        let job = self.job;
        let l = &job.rows.layouts[layout];
        let context = RowContext { chunk, origin: &job.s.graph.body[l.chosen].origin, pass: 0 };
        let at = self.home(layout);
        let chosen = self.get(l.chosen, chunk);
        let chosen = self.by_home(chosen, l.chosen, &at, context);
        let token = self.row_dim(RowDim::Token(layout));
        let (experts, choice) = (self.dim(l.routing.experts, &[]), self.dim_of(l.chosen, l.routing.choice));
        let group = self.group(layout);
        let by_group = [self.group_dims(&at), vec![group]].concat();
        let sorted = self.build(context, |b| {
            let number = b.op(Op::Iota(experts), &[]);
            let named = b.compare(Compare::Eq, chosen, number);
            b.body[named].ty.dims = vec![experts, token, choice];
            let hit = b.op(Op::Reduce { kind: Reduce::Any, over: vec![choice] }, &[named]);
            let one = b.cast(hit, DType::I32);
            let total = b.sum(one, &[token]);
            let total = b.op(Op::View { from: vec![experts], to: by_group.clone() }, &[total]);
            let ends = b.op(Op::Cumsum { over: group, reverse: false }, &[total]);
            // Ranks count from one here, so that a choice of no expert looks up 0, which is no rank.
            let begin = ir::fault!("rows.tables.begin", ends, b.sub(ends, total));
            let begin = b.op(Op::View { from: by_group, to: vec![experts] }, &[begin]);
            let among = b.op(Op::Cumsum { over: token, reverse: false }, &[one]);
            let rank = b.add(&[begin, among]);
            Sorted { chosen, hit, rank, ends }
        });
        self.rows.sorted.entry(layout).or_default().push((chunk, sorted));
        sorted
    }

    /// The tables of a layout at home, for the slots of a pass.
    pub(super) fn tables(&mut self, layout: usize, context: RowContext) -> HomeTables {
        let RowContext { chunk, pass, .. } = context;
        if let Some(home) = there(self.rows.homes.get(&(layout, pass)), chunk) {
            return home;
        }
        let job = self.job;
        let l = &job.rows.layouts[layout];
        let context = RowContext { origin: &job.s.graph.body[l.chosen].origin, ..context };
        let sorted = self.sorted(layout, chunk);
        let at = self.home(layout);
        let [slot, slots, token] = [RowDim::Slot(layout), RowDim::Slots(layout), RowDim::Token(layout)].map(|d| self.row_dim(d));
        let experts = self.dim(l.routing.experts, &[]);
        let groups = self.group_dims(&at);
        let by_group = [groups.clone(), vec![self.group(layout)]].concat();
        let by_slot = [groups, vec![slot]].concat();
        let strides = self.out.body.dims.strides(&by_slot);
        let (room, most, passes) = (self.out.body.dims.size(slot), self.most_rows(layout), self.passes(layout));
        let first_row = ir::fault!("rows.passes.begin", pass * room.saturating_sub(1), pass * room);
        let home = self.build(context, |b| {
            let (mut number, mut placed, mut ends) = (sorted.rank, sorted.hit, sorted.ends);
            if room < most {
                let room = b.int(room as i64);
                if first_row > 0 {
                    let less = b.int(-(first_row as i64));
                    number = b.add(&[number, less]);
                    ends = b.add(&[ends, less]);
                }
                let mut fits = b.compare(Compare::Le, number, room);
                if first_row > 0 {
                    let none = b.int(0);
                    let behind = b.compare(Compare::Gt, number, none);
                    fits = ir::fault!("rows.passes.before", fits, b.binary(Binary::And, fits, behind));
                    ends = ir::fault!("rows.passes.ends", ends, b.binary(Binary::Max, ends, none));
                }
                placed = b.binary(Binary::And, sorted.hit, fits);
                ends = ir::fault!("rows.passes.room", ends, b.binary(Binary::Min, ends, room));
            }
            let mut terms = vec![];
            for (d, stride) in by_slot.iter().zip(&strides).filter(|(d, _)| **d != slot) {
                let (number, stride) = (b.op(Op::Iota(*d), &[]), b.int(*stride as i64));
                terms.push(b.mul(number, stride));
            }
            if !terms.is_empty() {
                // `before` is the number of slots of the groups before.
                let before = b.add(&terms);
                let before = b.expand(before, &by_group);
                let before = b.op(Op::View { from: by_group, to: vec![experts] }, &[before]);
                number = ir::fault!("rows.tables.groups", number, b.add(&[number, before]));
            }
            let (none, first, back) = (b.int(0), b.int(1), b.int(-1));
            let number = b.select(placed, number, none);
            let number = b.op(Op::Gather { dim: experts }, &[number, sorted.chosen]);
            let slot_of = b.add(&[number, back]);
            let of_slots = Type::new(DType::I32, [slots]);
            let count = b.typed(Op::Scatter { dim: slots }, &[first, slot_of], of_slots.clone());
            // All choices of a slot belong to the same token.
            let number = b.op(Op::Iota(token), &[]);
            let number = b.add(&[number, first]);
            let sum = b.typed(Op::Scatter { dim: slots }, &[number, slot_of], of_slots);
            let share = b.binary(Binary::Max, count, first);
            let number = b.div(sum, share);
            let number = b.add(&[number, back]);
            let token = b.op(Op::View { from: vec![slots], to: by_slot }, &[number]);
            HomeTables { slot_of, count, token, ends }
        });
        if pass == 0 && room * passes < most {
            let all = ir::fault!("rows.passes.limit", room * (passes + 1), room * passes);
            self.limit(sorted.ends, all, &at, context);
        }
        self.rows.homes.entry((layout, pass)).or_default().push((chunk, home));
        home
    }

    /// The most rows that a home has for a group, of all passes.
    fn most_of_group(&mut self, ends: Value, at: &RowSharding, context: RowContext) -> Value {
        let (groups, group) = (self.group_dims(at), self.group(at.layout));
        let last = self.out.body.dims.size(group) - 1;
        self.build(context, |b| {
            let rows = b.op(Op::Slice { from: group, to: None, at: last }, &[ends]);
            if groups.is_empty() { rows } else { b.op(Op::Reduce { kind: Reduce::Max, over: groups }, &[rows]) }
        })
    }

    /// Whether a pass after the first has rows, on any rank whose rows meet with those of this one: a bool that all
    /// of them have alike.
    pub(super) fn has_rows(&mut self, layout: usize, context: RowContext) -> Option<Value> {
        let RowContext { chunk, pass, .. } = context;
        if pass == 0 {
            return None;
        }
        let number = ir::fault!("rows.passes.second", 0, pass as usize - 1);
        if let Some(further) = there(self.rows.further.get(&layout), chunk) {
            return Some(further[number]);
        }
        let job = self.job;
        let context = RowContext { origin: &job.s.graph.body[job.rows.layouts[layout].chosen].origin, ..context };
        let peak = self.peak(layout, context);
        let slot = self.row_dim(RowDim::Slot(layout));
        let (room, passes) = (self.out.body.dims.size(slot), self.passes(layout));
        // The bools of all passes are built together, so that they form one kernel.
        let further = self.build(context, |b| {
            let asks = |pass: u64| {
                let before = b.int(ir::fault!("rows.passes.further", pass * room + 1, pass * room) as i64);
                b.compare(Compare::Gt, peak, before)
            };
            (1..passes).map(asks).collect::<Vec<_>>()
        });
        self.rows.further.entry(layout).or_default().push((chunk, further.clone()));
        Some(further[number])
    }

    /// The most rows of a group, of all homes whose rows meet.
    fn peak(&mut self, layout: usize, context: RowContext) -> Value {
        if let Some(peak) = there(self.rows.peaks.get(&layout), context.chunk) {
            return peak;
        }
        let ends = self.sorted(layout, context.chunk).ends;
        let at = self.home(layout);
        let most = self.most_of_group(ends, &at, context);
        let subs = ir::fault!("rows.passes.alone", vec![], self.meeting(layout));
        let peak = if subs.is_empty() {
            most
        } else {
            let why = Some(Reason::from("tells ranks whether any has rows for a further pass"));
            self.exchange(most, Collective::AllReduce(Reduce::Max), &subs, None, &why, context)
        };
        self.rows.peaks.entry(layout).or_default().push((context.chunk, peak));
        peak
    }

    /// The sub-axes along which rows of a layout, or their tables, are exchanged.
    fn meeting(&self, layout: usize) -> Vec<SubAxis> {
        let job = self.job;
        let body = &job.s.graph.body;
        let mut subs: Vec<SubAxis> = vec![];
        for v in body.values().filter(|v| job.rows.layout(*v) == Some(layout)) {
            let at = self.at_layout(v, layout);
            subs.extend(at.gathered.into_iter().chain(at.split));
            if let Op::Reshard { subs: over, .. } = &body[v].op {
                subs.extend(over);
            }
        }
        subs.sort_unstable();
        subs.dedup();
        subs
    }

    /// No group may have more rows than all passes have room for.
    fn limit(&mut self, ends: Value, room: u64, at: &RowSharding, context: RowContext) {
        let most = self.most_of_group(ends, at, context);
        let w = self.build(context, |b| b.op(Op::Limit { most: room }, &[most]));
        self.out.reasons[w.index()] = Some(Reason::avoided("rows from a rank to a group of experts", AvoidedBy::GreaterMoeBuffer));
    }

    /// A table of the slots that are somewhere.
    pub(super) fn table(&mut self, table: SlotTable, at: &RowSharding, context: RowContext) -> Value {
        if let Some(w) = there(self.rows.tables.get(&(table, at.clone(), context.pass)), context.chunk) {
            return w;
        }
        let (slot, group) = (self.row_dim(RowDim::Slot(at.layout)), self.group(at.layout));
        let size = self.out.body.dims.size(group) as i64;
        let context = ir::fault!("rows.passes.table", RowContext { pass: 0, ..context }, context);
        let w = match table {
            SlotTable::Token => {
                let token = self.tables(at.layout, context).token;
                self.moved(token, at, context)
            }
            SlotTable::Ends => {
                let ends = self.tables(at.layout, context).ends;
                self.moved(ends, at, context)
            }
            SlotTable::Expert => {
                let ends = self.table(SlotTable::Ends, at, context);
                self.build(context, |b| {
                    // The expert of a slot is the number of experts whose rows end before it.
                    let (number, size, none) = (b.op(Op::Iota(slot), &[]), b.int(size), b.int(-1));
                    let ended = b.compare(ir::fault!("rows.tables.expert", Compare::Lt, Compare::Le), ends, number);
                    let ended = b.cast(ended, DType::I32);
                    let expert = b.sum(ended, &[group]);
                    let someones = b.compare(Compare::Lt, expert, size);
                    b.select(someones, expert, none)
                })
            }
            SlotTable::Place => {
                let (token, expert) = (self.table(SlotTable::Token, at, context), self.table(SlotTable::Expert, at, context));
                self.build(context, |b| {
                    let (size, zero, none) = (b.int(size), b.int(0), b.int(-1));
                    let place = ir::fault!("rows.tables.place", token, b.mul(token, size));
                    let place = b.add(&[place, expert]);
                    let someones = b.compare(Compare::Ge, expert, zero);
                    b.select(someones, place, none)
                })
            }
        };
        self.rows.tables.entry((table, at.clone(), context.pass)).or_default().push((context.chunk, w));
        w
    }

    /// A table from home to where rows are.
    fn moved(&mut self, x: Value, at: &RowSharding, context: RowContext) -> Value {
        let why = Some(Reason::from("tells ranks which rows they get"));
        let (trades, gathers): (Vec<SubAxis>, Vec<SubAxis>) = at.gathered.iter().partition(|u| at.split.contains(u));
        let mut x = x;
        if !trades.is_empty() {
            let [from, to] = [self.groups_of(&trades), self.homes_of(&trades)];
            x = self.trade(x, Collective::AllToAll, &trades, &from, &to, &why, context);
        }
        if !gathers.is_empty() {
            let to = self.homes_of(&gathers);
            x = self.trade(x, Collective::AllGather, &gathers, &[], &to, &why, context);
        }
        let own: Vec<SubAxis> = at.split.iter().copied().filter(|u| !at.gathered.contains(u)).collect();
        let dims = self.groups_of(&own);
        self.own_part(x, &own, &dims, context)
    }

    pub(super) fn groups_of(&mut self, subs: &[SubAxis]) -> Vec<Dim> {
        subs.iter().map(|u| self.row_dim(RowDim::Groups(*u))).collect()
    }

    pub(super) fn homes_of(&mut self, subs: &[SubAxis]) -> Vec<Dim> {
        subs.iter().map(|u| self.row_dim(RowDim::Home(*u))).collect()
    }
}
