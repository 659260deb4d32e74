//! `mcc report`: a page of what a run has logged, in one file that reads nothing else.

mod charts;
mod curve;
mod history;
mod lines;
mod median;
mod metrics;
mod numbers;
mod page;
mod parts;
mod spent;
#[cfg(test)]
mod tests;

use super::clock::{now, seconds};
use super::log::{METRICS, RUN};
use super::profile::{self, PROFILE};
use crate::cli::ReportArgs;
use crate::failure::Failure;
use crate::files::{self, Wanted};
use crate::misuse::misuse;
use crate::print::{note, report};
use anyhow::{Context, anyhow};
use history::History;
use metrics::Metrics;
use numbers::of;
use page::Report;
use runtime::launch::{Existing, replaceable};
use runtime::paths::{same, write_whole};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The files that a report is made of; those that there are.
struct Files {
    metrics: Option<PathBuf>,
    run: Option<PathBuf>,
    profile: Option<PathBuf>,
}

impl Files {
    fn of(args: &ReportArgs) -> Result<Files, Failure> {
        files::look(&args.run, Wanted::Log)?;
        if let Some(file) = &args.metrics {
            files::look_for("--metrics", file, Wanted::Metrics)?;
        }
        if !args.run.is_dir() {
            if args.metrics.is_some() {
                return Err(misuse!("`{}` is a file of metrics, and `--metrics` names another: leave out either", args.run.display()).into());
            }
            return Ok(Files { metrics: Some(args.run.clone()), run: None, profile: None });
        }
        let there = |name: &str| Some(args.run.join(name)).filter(|file| file.is_file());
        let found = Files { metrics: args.metrics.clone().or_else(|| there(METRICS)), run: there(RUN), profile: there(PROFILE) };
        if found.metrics.is_none() && found.run.is_none() {
            let dir = args.run.display();
            return Err(anyhow!("`{dir}` has neither {METRICS} nor {RUN}: `mcc run --log-dir {dir}` writes them from its first step on").into());
        }
        Ok(found)
    }

    fn all(&self) -> impl Iterator<Item = &PathBuf> {
        self.metrics.iter().chain(&self.run).chain(&self.profile)
    }

    /// Seconds since 1970 when the last of them was written.
    fn written(&self) -> f64 {
        let times = self.all().filter_map(|file| fs::metadata(file).and_then(|m| m.modified()).ok());
        times.map(seconds).fold(0.0, f64::max)
    }
}

pub fn run(args: &ReportArgs) -> Result<(), Failure> {
    let found = Files::of(args)?;
    let default = || if args.run.is_dir() { args.run.join("report.html") } else { args.run.with_extension("html") };
    let output = args.output.clone().unwrap_or_else(default);
    let shown = output.display();
    if let Some(file) = found.all().find(|file| same(file, &output)) {
        return Err(misuse!("`{}` is what the report is made of: name another file for it", file.display()).into());
    }
    replaceable(&output, if args.force { Existing::Replace } else { Existing::Refuse })?;
    let report = read(args, &found)?;
    report.damage.iter().for_each(|what| note!("warning: {what}"));
    let page = report.page();
    write_whole(&output, |file| file.write_all(page.as_bytes())).with_context(|| format!("cannot write `{shown}`"))?;
    report!("wrote {shown}\n");
    Ok(())
}

fn read(args: &ReportArgs, files: &Files) -> Result<Report, Failure> {
    let cannot = |file: &Path| format!("cannot read `{}`", file.display());
    let mut report = Report { name: args.run.display().to_string(), made: now(), written: files.written(), ..Report::default() };
    let mut damage = |lines: u64, name: &str| match lines {
        0 => {}
        n => report.damage.push(format!("{} of {name} could not be read", of(n, "line"))),
    };
    if let Some(file) = &files.metrics {
        report.metrics = Metrics::read(file).with_context(|| cannot(file))?;
        if files.run.is_none() && report.metrics.steps.is_none() && report.metrics.damaged > 0 {
            return Err(anyhow!("`{}` holds no metrics: `mcc run --metrics FILE` writes such a file", file.display()).into());
        }
        damage(report.metrics.damaged, &file.file_name().map_or(METRICS.into(), |name| name.to_string_lossy()));
    }
    if let Some(file) = &files.run {
        report.history = History::read(file).with_context(|| cannot(file))?;
        damage(report.history.damaged, RUN);
        report.history.lasts_until(report.written);
    }
    if let Some(file) = &files.profile {
        match profile::read(file) {
            Ok(profile) => report.profile = Some(profile),
            Err(e) => report.damage.push(format!("{PROFILE} could not be read: {e}")),
        }
    }
    if args.run.is_dir() && files.metrics.is_none() {
        report.damage.push(format!(
            "there is no {METRICS} beside {RUN}: if the run wrote its metrics to another file, `mcc report --metrics FILE` draws them"
        ));
    }
    if report.metrics.steps.is_none() && files.metrics.is_some() && report.damage.is_empty() {
        report.damage.push("no step is done yet".into());
    }
    Ok(report)
}
