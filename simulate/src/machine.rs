//! Machine files: what devices, links and hosts do a second, each number with its source.
//!
//! A file is JSON, read by [`Machine::parse`], which checks it. The machines that mcc knows by name are in
//! `machines/`.

use crate::cost::{Cause, Cost, LEVELS};
use ir::op::DType;
use ir::tiles::Generation;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// No number of a machine is more, and none of those that are not 0 is less.
const MOST: f64 = 1e21;
const LEAST: f64 = 1e-12;

/// What is wrong with a machine file.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum MachineError {
    #[error("{0}")]
    Syntax(#[from] serde_json::Error),
    #[error("`{field}`: {why}")]
    Field { field: String, why: String },
}

/// A number of a machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figure {
    /// The number itself: bytes, seconds, operations, a count, or a part of a whole.
    pub value: f64,
    /// Of [`Machine::sources`].
    pub source: String,
    /// How far it may be off, as a part of itself: the interval of a prediction follows from it.
    #[serde(default)]
    pub spread: f64,
}

/// Where numbers are from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// Title of the document, or the command that measured.
    pub title: String,
    /// Where the document is on the web; `None` if the title has to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// `2024`, `2024-03` or `2024-03-18`.
    pub date: String,
    /// What it says, or how the number follows from it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// A kind of machine, of which there are as many as a job needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// As people call it: `DGX H100`.
    pub name: String,
    /// What whoever uses it should know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    /// What code runs on its devices: `cpu`, `sm_80`, `sm_90a`.
    pub target: String,
    /// Devices of a machine, one for each rank; of CPUs cores, which ranks share.
    pub devices: u64,
    /// By the keys that figures have in `source`.
    pub sources: BTreeMap<String, Source>,
    /// What one device does: a GPU, or a core of a CPU.
    pub device: Device,
    /// From the innermost to the outermost.
    pub links: Vec<Link>,
    /// What kernels and exchanges lose beside each other.
    pub contention: Contention,
    /// What the host does for the devices.
    pub host: Host,
    /// How often devices fail, and what it takes to go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reliability: Option<Reliability>,
    /// What was measured of kernels as they are: it is believed before all else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured: Option<Measured>,
}

/// Seconds that kernels took.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Of a rank, on CPUs; 1 on GPUs. With others kernels take longer or shorter: then these are not looked at.
    pub threads: u64,
    /// By their symbols, which tell kernels apart by all that they compute.
    pub kernels: BTreeMap<String, Figure>,
}

/// A device: a GPU, or a core of a CPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// That tiles of products are shared among; 1 where they are not.
    pub multiprocessors: Figure,
    /// Peak rates of products.
    pub flops: Peaks,
    /// How near matrix products come to peak rates.
    pub products: Products,
    /// How near attention comes to peak rates.
    pub attention: AttentionRates,
    /// The device's memory; of CPUs the host's.
    pub memory: Memory,
    /// Seconds from the end of a kernel to the next one's beginning.
    pub launch: Figure,
    /// Seconds that the host takes between the phases of a step, in which it looks at loss and gradient norm.
    pub phase: Figure,
}

/// Operations a second at most, by the type of a product's factors. Of a CPU, those of one core.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peaks {
    /// bf16 and f16.
    pub half: Figure,
    /// f32 factors that are rounded to tf32.
    pub tf32: Figure,
    /// f32 factors as they are.
    pub f32: Figure,
}

/// How near matrix products come to the peak.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Products {
    /// The part of the peak that the best tiles reach.
    pub efficiency: Figure,
    /// What a wave that does not fill all multiprocessors takes beside the part of it that there is, of what is left
    /// to a full one: 1 if all of a wave's tiles end together, 0 if tiles divide evenly.
    pub tail: Figure,
    /// Contracted elements that a tile's beginning and end take as long as.
    pub depth: Figure,
    /// Rows, columns and relative rate; without them those that mcc makes code for the target with
    /// (`ir/src/tiles.rs`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tiles: Option<Tiles>,
}

/// Tiles that a device's products may be cut into.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tiles {
    /// Rows, columns and rate of each tile; rates are parts of the best, from 0.01 to 1.
    pub sizes: Vec<(u64, u64, f64)>,
    /// Of [`Machine::sources`].
    pub source: String,
}

/// Parts of the peak that attention reaches, with the pairs that a mask leaves and the products that the field
/// counts: two forward, five backward.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionRates {
    /// Part of the peak that the forward pass reaches.
    pub forward: Figure,
    /// Part of the peak that gradients reach.
    pub backward: Figure,
}

/// A device's memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    /// Bytes that it holds; of CPUs all ranks' together.
    pub bytes: Figure,
    /// Bytes that it moves a second at most; of CPUs those of one core.
    pub bytes_per_second: Figure,
    /// The part of that which large kernels reach.
    pub efficiency: Figure,
}

/// Links among so many ranks that follow each other.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// What the links are called, `NVLink`: each level has a name of its own.
    pub name: String,
    /// Of the outermost one none: it joins all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub members: Option<u64>,
    /// Of a rank, in one direction, while all use them.
    pub bytes_per_second: Figure,
    /// The part of that which large exchanges reach.
    pub efficiency: Figure,
    /// The same of sums for all that fill it, where a switch adds up: it may be more than 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switched_sums: Option<Figure>,
    /// Seconds that an exchange takes beside its bytes, and each step from rank to rank.
    pub latency: Figure,
    /// Seconds of each step from rank to rank.
    pub hop: Figure,
}

/// What is lost while a rank's kernels and exchanges run at once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contention {
    /// A kernel takes so much longer, as a part of its time.
    pub kernels: Figure,
    /// An exchange takes so much longer.
    pub exchanges: Figure,
}

/// The host of a machine's devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Of its memory, which the ranks of a machine share.
    pub bytes_per_second: Figure,
    /// Between its memory and a device's, in one direction.
    pub bus_bytes_per_second: Figure,
    /// Of its disks, which the ranks of a machine share.
    pub disk_bytes_per_second: Figure,
    /// Seconds until a thread goes on that has waited for another one, or for another rank: of ranks on CPUs, which
    /// have a thread for kernels and one for exchanges.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wake: Option<Figure>,
    /// The same where ranks have more threads than there are cores: another one has to leave the core first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crowded_wake: Option<Figure>,
}

/// What a long job is interrupted by, and goes on from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reliability {
    /// Seconds that a device and its part of a machine run in the mean until a job that uses it ends unexpectedly.
    pub between_failures: Figure,
    /// Seconds from such an end until the job reads its checkpoint.
    pub restart: Figure,
    /// Of a machine, to and from the storage that all share, while all use it.
    pub storage_bytes_per_second: Figure,
    /// Of a rank, from its device to the host's memory, with the hashes that a checkpoint has of it.
    pub copy_bytes_per_second: Figure,
}

/// A number of a machine, and what it governs.
pub struct Governed<'a> {
    /// Where it is in a machine file: `device.memory.efficiency`, `links.NVLink.hop`.
    pub name: String,
    /// The number, with its source and spread.
    pub figure: &'a Figure,
    /// What takes time by it; empty if it changes no time of a step.
    pub causes: Vec<Cause>,
    /// Whether times due to these causes grow as the number does; else they shrink.
    pub is_time: bool,
}

/// The machines that are known by name.
pub const KNOWN: [(&str, &str); 5] = [
    ("a100-80g-dgx", include_str!("../../machines/a100-80g-dgx.json")),
    ("h100-dgx", include_str!("../../machines/h100-dgx.json")),
    ("h200", include_str!("../../machines/h200.json")),
    ("b200", include_str!("../../machines/b200.json")),
    ("cpu", include_str!("../../machines/cpu.json")),
];

impl Machine {
    /// Of a file's text.
    ///
    /// # Errors
    /// Text that is no JSON of a machine; numbers that no machine has; sources that are not listed.
    pub fn parse(text: &str) -> Result<Machine, MachineError> {
        let machine: Machine = serde_json::from_str(text)?;
        machine.check()?;
        Ok(machine)
    }

    /// One of [`KNOWN`].
    pub fn named(name: &str) -> Option<Machine> {
        let text = KNOWN.iter().find(|k| k.0 == name)?.1;
        Some(Machine::parse(text).expect("invariant: a test reads each"))
    }

    /// Seconds that a kernel took, if it was measured with so many threads of a rank.
    pub fn measured(&self, symbol: &str, threads: u64) -> Option<f64> {
        let measured = self.measured.as_ref().filter(|m| m.threads == threads || !self.is_cpu())?;
        measured.kernels.get(symbol).map(|figure| figure.value)
    }

    /// Whether ranks run on cores of a CPU rather than on GPUs.
    pub fn is_cpu(&self) -> bool {
        self.target == "cpu"
    }

    /// What a thread takes to go on that has waited, of one of so many ranks on CPUs.
    pub fn wake(&self, ranks: u64, threads: u64) -> Cost {
        let is_crowded = ranks.saturating_mul(threads) > self.devices;
        let (figure, cause) = if is_crowded { (&self.host.crowded_wake, Cause::CrowdedWake) } else { (&self.host.wake, Cause::Wake) };
        figure.as_ref().map_or(Cost::default(), |figure| Cost::new(cause, figure.value))
    }

    /// The generation of its GPUs, if mcc makes code for it.
    pub fn generation(&self) -> Option<Generation> {
        Generation::ALL.into_iter().find(|g| g.name() == self.target)
    }

    /// Operations a second of products with such factors.
    pub fn peak(&self, factors: DType, tf32: bool) -> f64 {
        self.peak_figure(factors, tf32).value
    }

    fn peak_figure(&self, factors: DType, tf32: bool) -> &Figure {
        let peaks = &self.device.flops;
        match (factors.is_half(), tf32) {
            (true, _) => &peaks.half,
            (false, true) => &peaks.tf32,
            (false, false) => &peaks.f32,
        }
    }

    /// As [`Machine::numbers`], of the peaks only that which matters to a job with such factors.
    pub fn governed(&self, (factors, tf32): (DType, bool)) -> Vec<Governed<'_>> {
        let peak = self.peak_figure(factors, tf32);
        let is_other = |g: &Governed<'_>| g.name.starts_with("device.flops.") && !std::ptr::eq(g.figure, peak);
        self.numbers().into_iter().filter(|g| !is_other(g)).collect()
    }

    /// Its numbers, all but measured kernels', with what they govern.
    pub fn numbers(&self) -> Vec<Governed<'_>> {
        let (device, host) = (&self.device, &self.host);
        let products = [Cause::Product, Cause::Depth, Cause::Tail, Cause::DepthOfTail];
        let attention = [Cause::AttentionForward, Cause::AttentionBackward];
        let arithmetic = [&products[..], &attention].concat();
        let of = |name: &str, figure, causes: &[Cause], is_time| Governed { name: name.into(), figure, causes: causes.to_vec(), is_time };
        let rate = |name: &str, figure, causes: &[Cause]| of(name, figure, causes, false);
        let time = |name: &str, figure, cause: Cause| of(name, figure, &[cause], true);
        let mut all = vec![
            rate("device.multiprocessors", &device.multiprocessors, &[]),
            rate("device.flops.half", &device.flops.half, &arithmetic),
            rate("device.flops.tf32", &device.flops.tf32, &arithmetic),
            rate("device.flops.f32", &device.flops.f32, &arithmetic),
            rate("device.products.efficiency", &device.products.efficiency, &products),
            of("device.products.tail", &device.products.tail, &[Cause::Tail, Cause::DepthOfTail], true),
            of("device.products.depth", &device.products.depth, &[Cause::Depth, Cause::DepthOfTail], true),
            rate("device.attention.forward", &device.attention.forward, &attention[..1]),
            rate("device.attention.backward", &device.attention.backward, &attention[1..]),
            rate("device.memory.bytes", &device.memory.bytes, &[]),
            rate("device.memory.bytes_per_second", &device.memory.bytes_per_second, &[Cause::Memory]),
            rate("device.memory.efficiency", &device.memory.efficiency, &[Cause::Memory]),
            time("device.launch", &device.launch, Cause::Launch),
            time("device.phase", &device.phase, Cause::Gap),
            time("contention.kernels", &self.contention.kernels, Cause::HeldKernels),
            time("contention.exchanges", &self.contention.exchanges, Cause::HeldExchanges),
            rate("host.bytes_per_second", &host.bytes_per_second, &[Cause::Host]),
            rate("host.bus_bytes_per_second", &host.bus_bytes_per_second, &[Cause::Bus]),
            rate("host.disk_bytes_per_second", &host.disk_bytes_per_second, &[Cause::Disk]),
        ];
        if let Some(Reliability { between_failures, restart, storage_bytes_per_second, copy_bytes_per_second }) = &self.reliability {
            all.push(of("reliability.between_failures", between_failures, &[], false));
            all.push(of("reliability.restart", restart, &[], true));
            all.push(of("reliability.storage_bytes_per_second", storage_bytes_per_second, &[], false));
            all.push(of("reliability.copy_bytes_per_second", copy_bytes_per_second, &[], false));
        }
        all.extend(host.wake.iter().map(|figure| time("host.wake", figure, Cause::Wake)));
        all.extend(host.crowded_wake.iter().map(|figure| time("host.crowded_wake", figure, Cause::CrowdedWake)));
        for (level, link) in (0..).zip(&self.links) {
            let name = |field: &str| format!("links.{}.{field}", link.name);
            let switched = Cause::Switched(level);
            all.push(rate(&name("bytes_per_second"), &link.bytes_per_second, &[Cause::Bytes(level), switched]));
            all.push(rate(&name("efficiency"), &link.efficiency, &[Cause::Bytes(level)]));
            all.extend(link.switched_sums.iter().map(|figure| rate(&name("switched_sums"), figure, &[switched])));
            all.push(time(&name("latency"), &link.latency, Cause::Latency(level)));
            all.push(time(&name("hop"), &link.hop, Cause::Hop(level)));
        }
        all
    }

    fn check(&self) -> Result<(), MachineError> {
        let wrong = |field: &str, why: String| Err(MachineError::Field { field: field.into(), why });
        if !self.is_cpu() && self.generation().is_none() {
            let known = Generation::ALL.map(Generation::name).join("`, `");
            return wrong("target", format!("`{}` is none of `cpu`, `{known}`", self.target));
        }
        if !(1..=1 << 20).contains(&self.devices) {
            return wrong("devices", format!("a machine has 1 to {}", 1 << 20));
        }
        for (name, source) in &self.sources {
            if source.title.trim().is_empty() {
                return wrong(&format!("sources.{name}.title"), "it is empty".into());
            }
            if !is_date(&source.date) {
                return wrong(&format!("sources.{name}.date"), format!("`{}` is no `2024`, `2024-03` or `2024-03-18`", source.date));
            }
        }
        let kernels = self.measured.iter().flat_map(|m| &m.kernels);
        let measured = kernels.map(|(name, figure)| (format!("measured.kernels.{name}"), figure));
        for (name, figure) in self.numbers().into_iter().map(|g| (g.name, g.figure)).chain(measured) {
            let least_is_zero = ["wake", "restart", "crowded_wake", "launch", "phase", "latency", "hop", "kernels", "exchanges", "tail", "depth"];
            let last = name.rsplit('.').next().unwrap_or_default();
            let may_be_zero = least_is_zero.contains(&last);
            if figure.value > MOST || (!may_be_zero && (0.0..LEAST).contains(&figure.value) && figure.value > 0.0) {
                return wrong(&name, format!("{:e} is nothing that a machine has", figure.value));
            }
            let is_part = ["efficiency", "forward", "backward", "tail"].contains(&last);
            if !figure.value.is_finite() || figure.value < 0.0 || (figure.value == 0.0 && !may_be_zero) {
                return wrong(&name, format!("{} is {}", figure.value, if may_be_zero { "less than 0" } else { "not more than 0" }));
            }
            if is_part && figure.value > 1.0 {
                return wrong(&name, format!("{} is more than 1, but it is a part of a whole", figure.value));
            }
            if !(0.0..1.0).contains(&figure.spread) {
                return wrong(&name, format!("a spread of {} is not from 0 to 1", figure.spread));
            }
            self.is_listed(&name, &figure.source)?;
        }
        if let Some(tiles) = &self.device.products.tiles {
            let field = "device.products.tiles";
            self.is_listed(field, &tiles.source)?;
            let sizes = 1..=1 << 16;
            let is_tile = |(rows, columns, rate): &(u64, u64, f64)| sizes.contains(rows) && sizes.contains(columns) && *rate > 0.01 && *rate <= 1.0;
            if tiles.sizes.is_empty() || !tiles.sizes.iter().all(is_tile) {
                return wrong(field, "each is rows, columns, and a rate of 0.01 to 1; there is at least one".into());
            }
        }
        if self.links.is_empty() || self.links.len() > LEVELS {
            return wrong("links", format!("there are {}, not 1 to {LEVELS}", self.links.len()));
        }
        let names: BTreeSet<&str> = self.links.iter().map(|l| l.name.trim()).collect();
        if names.len() < self.links.len() || names.contains("") {
            return wrong("links", "each has a name of its own".into());
        }
        if !self.is_cpu() && [&self.host.wake, &self.host.crowded_wake].iter().any(|f| f.is_some()) {
            return wrong("host.wake", "it is of ranks on CPUs: streams of GPUs wait by themselves".into());
        }
        if self.is_cpu() && self.links.len() > 1 {
            return wrong("links", "of CPUs all ranks are on one machine: one level joins them".into());
        }
        let sizes: Vec<u64> = self.links.iter().map(|l| l.members.unwrap_or(u64::MAX)).collect();
        if !sizes.is_sorted_by(|a, b| a < b) || sizes[0] == 0 || *sizes.last().expect("invariant: there are some") != u64::MAX {
            return wrong("links", "each joins more ranks than the one before, and the last one, without `members`, all".into());
        }
        Ok(())
    }

    fn is_listed(&self, field: &str, source: &str) -> Result<(), MachineError> {
        match self.sources.contains_key(source) {
            true => Ok(()),
            false => Err(MachineError::Field { field: field.into(), why: format!("its source `{source}` is not among `sources`") }),
        }
    }
}

/// Whether it is a year, with a month or a day or without.
fn is_date(text: &str) -> bool {
    let parts: Vec<&str> = text.split('-').collect();
    let number = |part: &str, digits: usize, most: u32| {
        part.len() == digits && part.bytes().all(|b| b.is_ascii_digit()) && (1..=most).contains(&part.parse().unwrap_or(0))
    };
    match parts[..] {
        [year] => number(year, 4, 9999),
        [year, month] => number(year, 4, 9999) && number(month, 2, 12),
        [year, month, day] => number(year, 4, 9999) && number(month, 2, 12) && number(day, 2, 31),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_are_known_can_be_read() {
        for (name, text) in KNOWN {
            let machine = Machine::parse(text).unwrap_or_else(|e| panic!("{name}: {e}"));
            let used: Vec<&str> = machine.numbers().iter().map(|g| g.figure.source.as_str()).collect();
            let tiles = machine.device.products.tiles.as_ref().map(|t| t.source.as_str());
            let idle: Vec<&String> = machine.sources.keys().filter(|s| !used.contains(&s.as_str()) && tiles != Some(s.as_str())).collect();
            assert!(idle.is_empty(), "{name}: nothing is from {idle:?}");
        }
    }

    /// Files of samples are read in place of a search, which has to find the same plans.
    #[test]
    fn numbers_are_read_as_they_were_written() {
        for number in [0.0014798847783580062, 0.0017895267102220169, 1e-9 / 3.0] {
            let text = serde_json::to_string(&number).expect("a number");
            assert_eq!(serde_json::from_str::<f64>(&text).expect("a number"), number, "{text}");
        }
    }

    fn changed(at: &str, to: serde_json::Value) -> String {
        let mut file: serde_json::Value = serde_json::from_str(KNOWN[0].1).expect("JSON");
        *file.pointer_mut(at).unwrap_or_else(|| panic!("{at}")) = to;
        Machine::parse(&file.to_string()).expect_err(at).to_string()
    }

    #[test]
    fn wrong_files_are_refused_with_their_field() {
        assert!(changed("/device/launch/value", (-1.0).into()).contains("`device.launch`: -1 is less than 0"));
        assert!(changed("/device/memory/bytes/value", 0.0.into()).contains("`device.memory.bytes`: 0 is not more than 0"));
        assert!(changed("/device/memory/efficiency/value", 1.5.into()).contains("1.5 is more than 1"));
        assert!(changed("/device/launch/source", "hearsay".into()).contains("`hearsay` is not among `sources`"));
        assert!(changed("/target", "sm_70".into()).contains("`sm_70` is none of `cpu`, `sm_80`, `sm_90a`"));
        assert!(changed("/links/0/members", serde_json::Value::Null).contains("`links`: each joins more"));
        assert!(changed("/links", serde_json::json!([])).contains("there are 0"));
        assert!(changed("/links/1/name", "NVLink".into()).contains("a name of its own"));
        assert!(changed("/device/multiprocessors/value", 1e308.into()).contains("1e308 is nothing that a machine has"));
        assert!(changed("/device/memory/bytes_per_second/value", 1e-320.into()).contains("is nothing that a machine has"));
        assert!(changed("/device/launch/spread", 2.0.into()).contains("a spread of 2"));
        let source = serde_json::json!({"title": "x", "date": "March"});
        let mut file: serde_json::Value = serde_json::from_str(KNOWN[0].1).expect("JSON");
        file["sources"]["mine"] = source;
        assert!(Machine::parse(&file.to_string()).expect_err("a date").to_string().contains("`March` is no"));
        assert!(Machine::parse("{}").expect_err("fields").to_string().contains("missing field"));
    }
}
