//! What happened before what: vector clocks over the warps of a block and over what works for them in the background.
//!
//! Flanagan and Freund, "FastTrack: Efficient and Precise Dynamic Race Detection" (2009), with one addition: besides
//! what an agent has *seen*, a view has what of that lies before a proxy fence. An access of the async proxy (tensor
//! copies, `wgmma`) may touch what the generic proxy wrote only if the write is *fenced* (PTX ISA, section 8.5,
//! proxy-preserved base causality order).

use std::collections::BTreeMap;
use std::sync::Arc;

/// An agent that accesses memory: a warp itself, or one of its engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    Warp,
    /// `cp.async`: generic proxy.
    Copy,
    /// Bulk and tensor copies: async proxy.
    Bulk,
    /// `wgmma`: async proxy.
    Matrix,
}

const ENGINES: usize = 4;

/// An agent and its moment, in 32 bits. 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp(u32);

const MOMENTS: u32 = 24;

impl Stamp {
    pub fn new(warp: usize, engine: Engine, moment: u32) -> Stamp {
        debug_assert!(moment < 1 << MOMENTS);
        Stamp(((warp * ENGINES + engine as usize) as u32) << MOMENTS | moment)
    }

    fn agent(self) -> usize {
        (self.0 >> MOMENTS) as usize
    }

    fn moment(self) -> u32 {
        self.0 & ((1 << MOMENTS) - 1)
    }

    pub fn warp(self) -> usize {
        self.agent() / ENGINES
    }

    pub fn is_none(self) -> bool {
        self.0 == 0
    }

    /// Whether the agent uses the async proxy.
    pub fn is_async(self) -> bool {
        self.agent() % ENGINES >= Engine::Bulk as usize
    }

    pub fn describe(self, what: &str) -> String {
        let engine = ["itself", "by cp.async", "by a bulk copy", "by wgmma"][self.agent() % ENGINES];
        let a = if what.starts_with('a') { "an" } else { "a" };
        format!("{a} {what} of warp {} {engine}", self.agent() / ENGINES)
    }
}

/// For each agent, the moment up to which its accesses are known to be over, and the moment up to which they lie
/// before a proxy fence.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct View {
    seen: Vec<u32>,
    fenced: Vec<u32>,
    /// Trips to global memory that have gone by, as far as they are counted ([`crate::counts::Counts`]).
    pub trips: u32,
    /// What is known of other blocks; `None` as long as nothing is.
    others: Option<Arc<BlockViews>>,
}

/// What is known of blocks, by their numbers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BlockViews(BTreeMap<u32, View>);

impl BlockViews {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether an access of a block is known to be over.
    pub fn has(&self, block: u32, s: Stamp) -> bool {
        self.0.get(&block).is_some_and(|v| v.has_seen(s))
    }

    pub fn learn(&mut self, other: Option<&BlockViews>) {
        for (block, view) in other.iter().flat_map(|k| &k.0) {
            self.learn_of(*block, view);
        }
    }

    pub fn learn_of(&mut self, block: u32, view: &View) {
        let own = self.0.entry(block).or_insert_with(|| View::new(view.seen.len() / ENGINES));
        own.join(&View { others: None, trips: 0, ..view.clone() });
    }
}

impl View {
    pub fn new(warps: usize) -> View {
        View { seen: vec![0; warps * ENGINES], fenced: vec![0; warps * ENGINES], trips: 0, others: None }
    }

    pub fn join(&mut self, other: &View) {
        let larger = |a: &mut [u32], b: &[u32]| a.iter_mut().zip(b).for_each(|(a, b)| *a = (*a).max(*b));
        larger(&mut self.seen, &other.seen);
        larger(&mut self.fenced, &other.fenced);
        self.trips = self.trips.max(other.trips);
        match (&mut self.others, &other.others) {
            (_, None) => {}
            (own @ None, Some(_)) => own.clone_from(&other.others),
            (Some(own), Some(new)) if Arc::ptr_eq(own, new) => {}
            (Some(own), Some(new)) => Arc::make_mut(own).learn(Some(new)),
        }
    }

    /// What is known of other blocks.
    pub fn others(&self) -> Option<&BlockViews> {
        self.others.as_deref()
    }

    /// Learns what other blocks have published. One of them may be the agent's own.
    pub fn learn(&mut self, mut known: BlockViews, own: u32) {
        if let Some(view) = known.0.remove(&own) {
            self.join(&view);
        }
        if !known.is_empty() {
            Arc::make_mut(self.others.get_or_insert_default()).learn(Some(&known));
        }
    }

    /// Notes that all that was seen is now before a proxy fence.
    pub fn fence(&mut self) {
        self.fenced.clone_from(&self.seen);
    }

    pub fn has_seen(&self, s: Stamp) -> bool {
        self.seen[s.agent()] >= s.moment()
    }

    pub fn has_fenced(&self, s: Stamp) -> bool {
        self.fenced[s.agent()] >= s.moment()
    }

    pub fn see(&mut self, s: Stamp) {
        let at = &mut self.seen[s.agent()];
        *at = (*at).max(s.moment());
    }
}
