//! For fuzzing: what a run makes of words that carry the right hashes and may say anything.

use super::control::{Down, Up};
use super::gather::Gather;
use super::options::RunOptions;
use super::plan::{self, Hello};
use super::process::LauncherEvent;
use super::ranks::{place, waits};
use super::replicas::Replicas;
use super::sensible::EventChecker;
use crate::conditions::Conditions;
use crate::executor::CommandOrder;
use crate::gpu::nccl;
use crate::profile::{self, Profile, ProfileWindow};
use crate::protocol::{Event, OnNonfinite, Orders};
use crate::target::{DeviceKind, Exchanges};
use crate::world::World;
use ir::model::{Decay, LearningRateSchedule};
use ir::op::Real;
use ir::program::Job;
use std::io;

/// The orders of a run of four steps, of which all are timed.
fn orders() -> Orders {
    let schedule = LearningRateSchedule { decay: Decay::Constant, peak: Real(1.0), min: Real(0.0), warmup: 0, steps: 0, falling: None, constant: 0 };
    Orders {
        conditions: Conditions { data: vec![], batch: 1, steps: 4, schedule, recipe: None, precision: None },
        artifact: "a.mcc".into(),
        id: String::new(),
        data: vec![],
        valid_data: vec![],
        sets: None,
        samples: [0; 3],
        remarks: vec![],
        eval_interval: 2,
        eval_batches: 1,
        steps: 4,
        exit_interval: 0,
        check_replicas: 2,
        first_step: None,
        init: vec![],
        drawn: vec![],
        left_out: vec![],
        resume: None,
        skip: 0,
        save_weights: None,
        save_state: None,
        saves: None,
        threads: None,
        seed: 0,
        on_nonfinite: OnNonfinite::Skip { most: 2 },
        order: CommandOrder::Streams,
        profile: ProfileWindow::new(0, 4, 4),
        device: DeviceKind::Cpu,
        exchanges: Exchanges::Host,
        nccl: None,
        nccl_max_ctas: nccl::MAX_CTAS,
        offload_to: None,
        spread: None,
    }
}

/// What rank 0's process makes of what others say of their ranks, word after word; each begins with a byte that is
/// taken as the rank.
pub fn by_rank_0(job: &Job, mut bytes: &[u8]) {
    let orders = orders();
    let (mut checker, mut gather) = (EventChecker::new(job, &orders), Gather::new(job, &orders, None));
    let mut replicas = Replicas::new(job);
    let mut profile = Profile::new(job.mesh.world(), CommandOrder::Streams, None);
    while let Some((rank, rest)) = bytes.split_first()
        && let Ok((up, rest)) = postcard::take_from_bytes::<Up>(rest)
    {
        bytes = rest;
        match checker.believed(up.said(u64::from(*rank) % job.mesh.world())) {
            LauncherEvent::Event(_, Event::Step(event)) => drop(gather.step(event, 0)),
            LauncherEvent::Event(rank, Event::NonFinite { step, reports, blame }) => gather.nonfinite(rank, step, &reports, blame),
            LauncherEvent::Event(_, Event::Skipped { step, skips, most }) => gather.skipped(step, skips, most),
            LauncherEvent::Event(rank, Event::Sums { step, sums }) => drop(replicas.said(rank, step, &sums, |_| String::new())),
            LauncherEvent::Event(rank, Event::Profile(part)) => profile.add(rank, part),
            LauncherEvent::Health(rank, pulse) => drop((waits(job, rank, &pulse.status), place(job, rank, &pulse.status))),
            LauncherEvent::Closed(rank, Some(ended)) => drop(place(job, rank, &ended.status)),
            LauncherEvent::Event(..) | LauncherEvent::Begun(..) | LauncherEvent::Closed(_, None) | LauncherEvent::Lost(_) | LauncherEvent::Stop => {}
        }
    }
    let _ = gather.error().map(|e| e.to_string());
    if profile.ranks.iter().any(|r| !r.steps.is_empty()) {
        profile::trace::write(job, &profile, io::sink()).expect("a sink takes all");
        drop(profile::table::text(&profile::breakdown::Breakdown::new(job, &profile)));
    }
}

/// What the process of another rank, which is on `b`, at port 1, with cores 1, makes of rank 0's plan and words.
pub fn by_others(world: &World, options: &RunOptions, bytes: &[u8]) {
    let orders = orders();
    let hello = Hello { host: "b".into(), machine: "b".into(), port: 1, cores: 1, orders: vec![] };
    if let Ok(orders) = plan::followed(bytes, &hello, orders, world, options, None) {
        let spread = orders.spread.expect("a plan says where ranks are");
        assert_eq!(spread.places.len() as u64, world.size);
        for rank in 0..world.size {
            let _ = (spread.neighbours(rank), spread.senders(rank));
        }
    }
    let _ = postcard::from_bytes::<Down>(bytes);
}
