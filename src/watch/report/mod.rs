//! `mcc report`: a page of what one run has logged, or several, in one file that reads nothing else.

mod charts;
mod comparison;
mod curve;
mod elapsed;
mod history;
mod lines;
mod median;
mod metrics;
mod page;
mod parts;
mod spent;
#[cfg(test)]
mod tests;
mod timeline;

use super::clock::{now, seconds};
use super::log::{METRICS, RUN};
use super::profile::{self, PROFILE};
use crate::cli::ReportArgs;
use crate::failure::Failure;
use crate::files::{self, ExpectedInput};
use crate::misuse::misuse;
use crate::pages::numbers::of;
use crate::print::{note, report};
use anyhow::{Context, anyhow};
use history::History;
use metrics::Metrics;
use page::Report;
use runtime::launch::{Existing, replaceable};
use runtime::paths::{same, write_whole};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use timeline::Timeline;

/// The files that a report is made of; those that there are.
struct Files {
    metrics: Option<PathBuf>,
    run: Option<PathBuf>,
    profile: Option<PathBuf>,
}

impl Files {
    /// Of a directory or a file of metrics, and the file of metrics that is named for it.
    fn of(run: &Path, metrics: Option<&Path>) -> Result<Files, Failure> {
        files::look(run, ExpectedInput::Log)?;
        if let Some(file) = metrics {
            files::look_for("--metrics", file, ExpectedInput::Metrics)?;
        }
        if !run.is_dir() {
            if metrics.is_some() {
                return Err(misuse!("`{}` is a file of metrics, and `--metrics` names another: leave out either", run.display()).into());
            }
            return Ok(Files { metrics: Some(run.to_path_buf()), run: None, profile: None });
        }
        let there = |name: &str| Some(run.join(name)).filter(|file| file.is_file());
        let metrics = metrics.map(Path::to_path_buf).or_else(|| there(METRICS));
        let found = Files { metrics, run: there(RUN), profile: there(PROFILE) };
        if found.metrics.is_none() && found.run.is_none() {
            let dir = run.display();
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
    let output = output(args)?;
    let shown = output.display();
    let found = args.runs.iter().map(|run| Files::of(run, args.metrics.as_deref())).collect::<Result<Vec<Files>, Failure>>()?;
    told_apart(&args.runs, &found)?;
    if let Some(file) = found.iter().flat_map(Files::all).find(|file| same(file, &output)) {
        return Err(misuse!("`{}` is what the report is made of: name another file for it", file.display()).into());
    }
    replaceable(&output, if args.force { Existing::Replace } else { Existing::Refuse })?;
    let runs = args.runs.iter().zip(&found).map(|(run, files)| read(run, files)).collect::<Result<Vec<Report>, Failure>>()?;
    for run in &runs {
        let whose = if runs.len() > 1 { format!("{}: ", run.name) } else { String::new() };
        run.damage.iter().for_each(|what| note!("warning: {whose}{what}"));
    }
    let page = page::page(runs);
    write_whole(&output, |file| file.write_all(page.as_bytes())).with_context(|| format!("cannot write `{shown}`"))?;
    report!("wrote {shown}\n");
    Ok(())
}

/// Where the page goes. That of several runs is in none of their directories.
fn output(args: &ReportArgs) -> Result<PathBuf, Failure> {
    match (&args.runs[..], &args.output) {
        ([_, _, ..], _) if args.metrics.is_some() => {
            Err(misuse!("`--metrics` is the file of one run, and there are {}: name the file in place of its run", args.runs.len()).into())
        }
        (_, Some(output)) => Ok(output.clone()),
        ([one], None) => Ok(if one.is_dir() { one.join("report.html") } else { one.with_extension("html") }),
        (_, None) => Err(misuse!("a report of several runs is in none of their directories: add `-o FILE.html`").into()),
    }
}

/// One run named twice would be drawn over itself.
fn told_apart(runs: &[PathBuf], found: &[Files]) -> Result<(), Failure> {
    for (k, (run, files)) in runs.iter().zip(found).enumerate() {
        let is_same = |(_, other): &(&PathBuf, &Files)| other.all().any(|a| files.all().any(|b| same(a, b)));
        if let Some((earlier, _)) = runs.iter().zip(found).take(k).find(is_same) {
            return Err(misuse!("`{}` and `{}` are one run: name it once", earlier.display(), run.display()).into());
        }
    }
    Ok(())
}

fn read(run: &Path, files: &Files) -> Result<Report, Failure> {
    let cannot = |file: &Path| format!("cannot read `{}`", file.display());
    let mut report = Report { name: run.display().to_string(), made: now(), written: files.written(), ..Report::default() };
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
        report.timeline = Timeline::new(&report.history.events, &report.metrics.elapsed);
        report.metrics.elapsed.follow(&report.timeline);
    }
    if let Some(file) = &files.profile {
        match profile::read(file) {
            Ok(profile) => report.profile = Some(profile),
            Err(e) => report.damage.push(format!("{PROFILE} could not be read: {e}")),
        }
    }
    if run.is_dir() && files.metrics.is_none() {
        report.damage.push(format!(
            "there is no {METRICS} beside {RUN}: if the run wrote its metrics to another file, `mcc report --metrics FILE` draws them"
        ));
    }
    if report.metrics.steps.is_none() && files.metrics.is_some() && report.damage.is_empty() {
        report.damage.push("no step is done yet".into());
    }
    Ok(report)
}
