//! What ranks say about the same step, put together: a step of the run, or the first number that is not finite and
//! where it comes from.

use super::error::RunError;
use super::progress::StepMetrics;
use crate::data::DataSets;
use crate::executor::named;
use crate::protocol::{Blamed, Orders, StepEvent};
use ir::program::Job;
use ir::work::{model_flops, tokens};
use std::collections::BTreeMap;

/// Puts together what ranks say about the same step.
pub(super) struct Gather<'a> {
    job: &'a Job,
    steps: u64,
    /// Names of validation data sets that have a loss each.
    valid_names: &'a [String],
    tokens: f64,
    /// Of the peak of all devices, what the arithmetic of a step is per second.
    share: Option<f64>,
    /// By step: events that have come, until all have.
    open: BTreeMap<u64, Vec<StepEvent>>,
    nonfinite: Option<(u64, Vec<String>)>,
    blame: Option<(Blamed, u64)>,
    /// All ranks say the same.
    skipped: Option<RunError>,
}

impl<'a> Gather<'a> {
    /// `peak` is of all ranks: operations a second.
    pub(super) fn new(job: &'a Job, orders: &'a Orders, peak: Option<f64>) -> Self {
        Gather {
            job,
            steps: orders.steps,
            valid_names: orders.sets.as_ref().map_or(&[], DataSets::valid_names),
            tokens: tokens(job) as f64,
            share: peak.filter(|p| *p > 0.0).map(|peak| model_flops(job) / peak),
            open: BTreeMap::new(),
            nonfinite: None,
            blame: None,
            skipped: None,
        }
    }

    /// The step that is complete with this event.
    pub(super) fn step(&mut self, event: StepEvent, memory_bytes: u64) -> Option<StepMetrics> {
        let step = event.step;
        let events = self.open.entry(step).or_default();
        events.push(event);
        if (events.len() as u64) < self.job.mesh.world() {
            return None;
        }
        let events = self.open.remove(&step)?;
        let step_ms = events.iter().map(|e| e.milliseconds).fold(0.0, f64::max);
        let mut reports: BTreeMap<String, f64> = BTreeMap::new();
        let mut valid: BTreeMap<usize, f64> = BTreeMap::new();
        for event in &events {
            reports.extend(named(self.job, &event.reports));
            let losses = event.valid.iter().map(|reports| named(self.job, reports).remove("loss"));
            valid.extend(losses.enumerate().filter_map(|(set, loss)| Some((set, loss?))));
        }
        let valid_loss = (!valid.is_empty()).then(|| valid.values().sum::<f64>() / valid.len() as f64);
        let [ran, all] = [0, 1].map(|k| events.iter().map(|e| e.further_passes[k] as f64).sum::<f64>());
        let named = |(set, loss): (&usize, &f64)| Some((format!("valid_loss/{}", self.valid_names.get(*set)?), *loss));
        let valid_losses = valid.iter().filter_map(named).collect();
        Some(StepMetrics {
            step,
            steps: self.steps,
            loss: reports.remove("loss"),
            grad_norm: reports.remove("grad_norm"),
            lr: events[0].learning_rate,
            tokens_per_s: self.tokens / (step_ms / 1e3).max(1e-9),
            step_ms,
            mfu: self.share.map(|share| share / (step_ms / 1e3).max(1e-9)),
            memory_bytes,
            data_wait_ms: events.iter().map(|e| e.waited).fold(0.0, f64::max),
            data_bytes: events.iter().map(|e| e.read).max().unwrap_or(0),
            ranks: self.job.mesh.world(),
            valid_loss,
            valid_losses,
            loss_scale: events[0].loss_scale,
            further_passes: (all > 0.0).then(|| ran / all),
            skipped: events.iter().any(|e| e.skipped),
            reports,
        })
    }

    pub(super) fn nonfinite(&mut self, rank: u64, step: u64, reports: &[Option<f64>], blame: Option<Blamed>) {
        let wrong = self.job.reports.iter().zip(reports).filter_map(|(n, v)| v.filter(|v| !v.is_finite()).map(|v| format!("{n} = {v}")));
        let (_, values) = self.nonfinite.get_or_insert((step, vec![]));
        wrong.for_each(|w| {
            if !values.contains(&w) {
                values.push(w)
            }
        });
        if let Some(blame) = blame
            && self.blame.as_ref().is_none_or(|(b, r)| (blame.order, rank) < (b.order, *r))
        {
            self.blame = Some((blame, rank));
        }
    }

    pub(super) fn skipped(&mut self, step: u64, skips: u64, most: Option<u64>) {
        self.skipped = Some(match most {
            Some(most) => RunError::Skips { step, skips, most },
            None => RunError::Untrained { skips },
        });
    }

    pub(super) fn error(self) -> Option<RunError> {
        if let Some(skipped) = self.skipped {
            return Some(skipped);
        }
        let (step, values) = self.nonfinite?;
        let blame = match self.blame {
            Some((blame, rank)) => format!("it comes from rank {rank}, {}", blame.what),
            None => "no single kernel made it from finite numbers".into(),
        };
        Some(RunError::NonFinite { step, values, blame })
    }
}
