//! Instructions of a block's barriers, mbarriers and fences (PTX ISA, sections 9.7.13.1 and 9.7.13.15).

use crate::barrier::{Named, Phases};
use crate::block::{Block, Flow};
use crate::fault::Wrong;
use crate::inst::{Arrive, MemoryScope, Op, Src};
use crate::order::{Engine, Stamp, View};
use crate::shared::{aligned, in_shared, place, rank_of};
use crate::warp::State;

impl Block<'_> {
    pub fn synchronise(&mut self, w: usize, op: &Op, mask: u32) -> Result<(), Wrong> {
        let lanes = (0..32).filter(|l| mask >> l & 1 != 0);
        match op {
            Op::Bar { id, threads, wait, aligned } => {
                if *aligned {
                    self.converged(w, mask, "bar")?;
                }
                let first = mask.trailing_zeros() as usize;
                let (id, threads) = (self.warps[w].word(*id)[first], threads.map(|t| self.warps[w].word(t)[first]));
                self.arrive_at(w, id, threads, *wait)?;
            }
            Op::Fence => {
                let warp = &mut self.warps[w];
                let heard = std::mem::take(&mut warp.heard);
                warp.view.learn(heard, self.number);
                warp.released = Some(Box::new(warp.view.clone()));
                warp.tick(Engine::Warp);
            }
            Op::FenceProxy | Op::FenceBarriers => {
                let warp = &mut self.warps[w];
                if *op == Op::FenceProxy {
                    warp.view.fence();
                }
                self.barriers.phases.values_mut().filter(|b| warp.view.has_seen(b.init)).for_each(|b| b.fenced = true);
            }
            Op::BarrierInit(a, n) => {
                let (at, n) = (self.warps[w].addresses(*a), self.warps[w].word(*n));
                for l in lanes {
                    let address = self.own_place(w, at[l])?;
                    aligned(address, 8)?;
                    self.shared.note_write(address, 8, Block::own(&self.warps[w]))?;
                    if n[l] == 0 || n[l] >= 1 << 20 {
                        return Err(Wrong::Barrier { address, what: format!("it cannot expect {} arrivals", n[l]) });
                    }
                    let views = [0, 1].map(|_| View::new(self.barriers.count));
                    let init = self.warps[w].stamp(Engine::Warp);
                    let fresh = Phases { count: n[l], pending: n[l], bytes: 0, phase: 0, arrivals: views.clone(), done: views, init, fenced: false };
                    self.barriers.phases.insert(address, fresh);
                }
                self.warps[w].tick(Engine::Warp);
            }
            Op::BarrierInval(a) => {
                let at = self.warps[w].addresses(*a);
                for l in lanes {
                    let address = self.own_place(w, at[l])?;
                    self.barriers.find(address)?;
                    self.barriers.phases.remove(&address);
                }
            }
            Op::BarrierArrive { a, what, state, scope } => {
                let at = self.warps[w].addresses(*a);
                let n = match what {
                    Arrive::Count(n) | Arrive::Expect(n) | Arrive::ExpectOnly(n) => self.warps[w].word(*n),
                };
                let mut phases = [0; 32];
                for l in lanes {
                    let address = self.shared_place(w, at[l]);
                    let (bytes, arrivals) = match what {
                        Arrive::Count(_) => (0, n[l]),
                        Arrive::Expect(_) => (i64::from(n[l]), 1),
                        Arrive::ExpectOnly(_) => (i64::from(n[l]), 0),
                    };
                    self.seen_init(w, address)?;
                    if rank_of(address) != self.warps[w].rank() && (*scope != MemoryScope::Cluster || state.is_some()) {
                        let why = "at another block's mbarrier one arrives with `.release.cluster`, and gets no state";
                        return Err(Wrong::Barrier { address, what: why.into() });
                    }
                    let b = self.barriers.find(address)?;
                    phases[l] = b.phase;
                    b.bytes += bytes;
                    if bytes > 0
                        && let Some(counting) = &mut self.counting
                    {
                        counting.fills(address);
                    }
                    self.arrive_with(address, arrivals, Some(w), None)?;
                }
                if let Some(d) = state {
                    self.warps[w].set_long(*d, &phases, mask);
                }
                self.warps[w].tick(Engine::Warp);
            }
            Op::BarrierTest { d, a, phase, parity, suspend: _, scope } => {
                let (at, phase) = (self.warps[w].addresses(*a), self.phase(w, *phase));
                let (mut over, mut wait) = (0, None);
                for l in lanes {
                    let address = self.shared_place(w, at[l]);
                    self.seen_init(w, address)?;
                    if rank_of(address) != self.warps[w].rank() {
                        return Err(Wrong::Barrier { address, what: "one does not wait at another block's mbarrier".into() });
                    }
                    let b = self.barriers.find(address)?;
                    let is_over = if *parity { b.phase & 1 != phase[l] & 1 } else { b.phase > phase[l] };
                    if is_over {
                        over |= 1 << l;
                        if l == mask.trailing_zeros() as usize
                            && let Some(counting) = &mut self.counting
                        {
                            counting.waited(w, address);
                        }
                        let heard = if *scope == MemoryScope::Cluster { 2 } else { 1 };
                        b.done[..heard].iter().for_each(|done| self.warps[w].view.join(done));
                    } else {
                        wait = Some((address, b.phase));
                    }
                }
                self.warps[w].set_predicate(*d, over, mask);
                if let Some((barrier, phase)) = wait {
                    self.warps[w].state = State::Waiting { barrier, phase };
                }
            }
            Op::ClusterArrive { release } => {
                self.converged(w, mask, "barrier.cluster.arrive")?;
                let (warp, barrier) = (&mut self.warps[w], &mut self.barriers.cluster);
                if warp.arrived.replace(barrier.phase).is_some() {
                    return Err(Wrong::Undefined("a warp arrives at its cluster's barrier again before it has waited there".into()));
                }
                if *release {
                    barrier.arrivals.join(&warp.view);
                }
                warp.tick(Engine::Warp);
                self.open_cluster();
            }
            _ => unreachable!("invariant: only what synchronises comes here"),
        }
        Ok(())
    }

    /// `barrier.cluster.wait`, which is executed again when all have arrived.
    pub fn wait_for_cluster(&mut self, w: usize, mask: u32) -> Result<Flow, Wrong> {
        self.converged(w, mask, "barrier.cluster.wait")?;
        let (warp, barrier) = (&mut self.warps[w], &self.barriers.cluster);
        match warp.arrived {
            None => Err(Wrong::Undefined("a warp waits at its cluster's barrier and has not arrived there".into())),
            Some(phase) if phase < barrier.phase => {
                warp.view.join(&barrier.done);
                warp.arrived = None;
                Ok(Flow::Next)
            }
            Some(_) => {
                warp.state = State::Cluster;
                Ok(Flow::Moved)
            }
        }
    }

    /// Lets warps go on if all of the cluster that have not ended have arrived at its barrier.
    fn open_cluster(&mut self) {
        let barrier = &mut self.barriers.cluster;
        if self.warps.iter().any(|w| w.state != State::Done && w.arrived != Some(barrier.phase)) {
            return;
        }
        barrier.phase += 1;
        barrier.done.join(&barrier.arrivals);
        self.barriers.completed += 1;
        self.warps.iter_mut().filter(|w| w.state == State::Cluster).for_each(|w| w.state = State::Running);
    }

    fn phase(&self, w: usize, s: Src) -> [u64; 32] {
        self.warps[w].bits(s)
    }

    fn seen_init(&mut self, w: usize, address: u64) -> Result<(), Wrong> {
        let b = self.barriers.find(address)?;
        if self.warps[w].view.has_seen(b.init) {
            return Ok(());
        }
        Err(Wrong::Barrier { address, what: "nothing orders its initialisation before this use".into() })
    }

    /// Checks that a copy may complete bytes of an mbarrier.
    pub fn open_to_copies(&mut self, w: usize, address: u64) -> Result<(), Wrong> {
        self.seen_init(w, address)?;
        if self.barriers.find(address)?.fenced {
            return Ok(());
        }
        Err(Wrong::Barrier {
            address,
            what: "no `fence.mbarrier_init` or `fence.proxy.async` stands between its initialisation and a copy that uses it".into(),
        })
    }

    /// Expects so many more arrivals in this phase.
    pub fn expect_arrivals(&mut self, address: u64, n: u32) -> Result<(), Wrong> {
        self.barriers.find(address)?.pending += n;
        Ok(())
    }

    /// Arrives at an mbarrier, as a warp or for a copy that is complete after so many trips. If that ends the phase,
    /// waiting warps go on.
    pub fn arrive_with(&mut self, address: u64, n: u32, warp: Option<usize>, copy: Option<(Stamp, u32)>) -> Result<(), Wrong> {
        self.reachable(address)?;
        let b = self.barriers.find(address)?;
        if n > b.pending {
            return Err(Wrong::Barrier { address, what: format!("{n} arrivals where only {} are expected", b.pending) });
        }
        b.pending -= n;
        if let Some(w) = warp {
            let warp = &self.warps[w];
            b.arrivals[usize::from(rank_of(address) != warp.rank())].join(&warp.view);
        }
        if let Some((s, trips)) = copy {
            b.arrivals[0].see(s);
            b.arrivals[0].trips = b.arrivals[0].trips.max(trips);
        }
        self.end_phase(address);
        Ok(())
    }

    /// Completes bytes of a phase that this copy has brought, after so many trips.
    pub fn complete_bytes(&mut self, address: u64, bytes: u64, copy: Stamp, trips: u32) -> Result<(), Wrong> {
        self.reachable(address)?;
        let b = self.barriers.find(address)?;
        b.bytes -= bytes as i64;
        b.arrivals[0].see(copy);
        b.arrivals[0].trips = b.arrivals[0].trips.max(trips);
        self.end_phase(address);
        Ok(())
    }

    fn end_phase(&mut self, address: u64) {
        if self.barriers.settle(address) {
            for w in &mut self.warps {
                if matches!(w.state, State::Waiting { barrier, .. } if barrier == address) {
                    w.state = State::Running;
                }
            }
        }
    }

    fn arrive_at(&mut self, w: usize, id: u32, threads: Option<u32>, wait: bool) -> Result<(), Wrong> {
        if id > 15 {
            return Err(Wrong::Undefined(format!("there is no barrier {id}: they are 0 to 15")));
        }
        if threads.is_some_and(|t| t == 0 || t % 32 != 0) || threads.is_none() && !wait {
            return Err(Wrong::Undefined("a barrier takes a multiple of 32 threads".into()));
        }
        let fresh = || Named { arrived: 0, threads, waiting: vec![], view: View::new(self.barriers.count) };
        let key = (self.warps[w].rank(), id);
        let b = self.barriers.named.entry(key).or_insert_with(fresh);
        if b.threads != threads {
            return Err(Wrong::Undefined(format!("warps come to barrier {id} with different numbers of threads")));
        }
        b.arrived += 32;
        b.view.join(&self.warps[w].view);
        self.warps[w].tick(Engine::Warp);
        if wait {
            b.waiting.push(w);
            self.warps[w].state = State::Barrier(id);
        }
        self.open(key)
    }

    /// Lets warps go on if all that a barrier waits for have come.
    fn open(&mut self, key: (u64, u32)) -> Result<(), Wrong> {
        let left = self.warps.iter().filter(|w| w.rank() == key.0 && w.state != State::Done).count() as u32 * 32;
        let Some(b) = self.barriers.named.get(&key) else { return Ok(()) };
        let needed = b.threads.unwrap_or(left);
        if b.arrived < needed {
            return Ok(());
        }
        if b.arrived > needed {
            return Err(Wrong::Undefined(format!("{} threads come to barrier {}, which takes {needed}", b.arrived, key.1)));
        }
        let b = self.barriers.named.remove(&key).expect("invariant: it was found");
        for w in b.waiting {
            self.warps[w].view.join(&b.view);
            self.warps[w].state = State::Running;
        }
        Ok(())
    }

    /// Notes that a warp has ended: barriers of the whole block and of the cluster no longer wait for it.
    pub fn left_block(&mut self, w: usize) {
        let rank = self.warps[w].rank();
        let keys: Vec<(u64, u32)> = self.barriers.named.iter().filter(|b| b.0.0 == rank && b.1.threads.is_none()).map(|b| *b.0).collect();
        for key in keys {
            let opened = self.open(key);
            debug_assert!(opened.is_ok(), "fewer threads are left than have come");
        }
        self.open_cluster();
    }

    /// The place of an address in shared memory, which may be generic, for a warp.
    pub fn shared_place(&self, w: usize, address: u64) -> u64 {
        place(self.warps[w].rank(), in_shared(address))
    }

    /// The same of what reaches its own block alone.
    ///
    /// # Errors
    /// It is another block's.
    pub fn own_place(&self, w: usize, address: u64) -> Result<u64, Wrong> {
        let place = self.shared_place(w, address);
        if rank_of(place) == self.warps[w].rank() {
            return Ok(place);
        }
        Err(Wrong::Undefined("shared memory of another block is reached by `.shared::cluster`".into()))
    }

    /// Checks that the block with a place in shared memory has not ended.
    pub fn reachable(&self, place: u64) -> Result<(), Wrong> {
        let mut of_rank = self.warps.iter().filter(|w| w.rank() == rank_of(place));
        if self.warps[0].place.ranks == 1 || of_rank.any(|w| w.state != State::Done) {
            return Ok(());
        }
        let why = format!("shared memory of block {} of the cluster is used when the block has ended: `barrier.cluster` is missing", rank_of(place));
        Err(Wrong::Undefined(why))
    }
}
