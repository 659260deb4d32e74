//! The samples of training, validation and test: data sets, their orders and their blend.
//!
//! Which samples there are, and in which order, is what `BlendedMegatronDatasetBuilder` of megatron-core 0.16 makes
//! of the same request, unless that asks for rows of whole documents ([`Layout::Packed`]). [`Dataset::sample`] gives
//! any of them. Many threads and processes may ask at once, and share the memory that tokens and orders are in.

mod sample;

pub use sample::{Piece, Sample};

use crate::blend::{Blend, BlendError, BlendedOrder, sizes};
use crate::cache::{self, CachedRows, Rows};
use crate::cores;
use crate::indexed::{Indexed, IndexedError, bare, with};
use crate::machine;
use crate::mask::{Mask, MaskError, Masks};
use crate::order::{Extent, ExtraToken, Layout, MOST, Order, OrderError, Remainder, Rule};
use crate::packing::{self, Packed, Statistics};
use crate::split::{Part, Split, SplitError, normalized};
use blake3::Hash;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where samples come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// One blend, of which each part has some documents of each data set.
    Shared {
        /// The data sets of all three parts.
        blend: Blend,
        /// Which sequences of each data set a part has.
        split: Split,
    },
    /// A blend for each of training, validation and test.
    Own([Option<Blend>; 3]),
}

/// Where orders are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cache {
    /// In `PREFIX.cache`, beside each data set.
    Beside,
    /// In this folder, for all data sets.
    Folder(PathBuf),
    /// In memory alone.
    Nowhere,
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// The data sets, and what each part has of them.
    pub source: Source,
    /// Samples of each part. None takes one epoch.
    pub samples: [Option<u64>; 3],
    /// Tokens of a sample, without the extra one; 1 or more.
    pub sequence_length: u32,
    /// Seed of all shuffles, as Megatron's `--seed`.
    pub seed: u32,
    /// How documents become samples.
    pub layout: Layout,
    /// Whether masks beside the data sets say which tokens count as labels.
    pub masks: Masks,
    /// Packed documents leave the extra token empty, unless a document goes on behind the row.
    pub extra: ExtraToken,
    /// What becomes of validation's last tokens; those of training and test are dropped.
    pub valid_rest: Remainder,
    /// How many more samples than the blend takes are made of each data set, as a part of them. Megatron's is 0.005.
    pub surplus: f64,
    /// Where orders and blends are kept, to be read the next time.
    pub cache: Cache,
    /// What fills a sample that has too few tokens.
    pub pad: u32,
}

impl Request {
    /// Megatron's defaults.
    pub fn new(source: Source, samples: [Option<u64>; 3], sequence_length: u32) -> Request {
        let (layout, masks, extra, valid_rest) = (Layout::Stream, Masks::Nowhere, ExtraToken::Included, Remainder::Dropped);
        Request { source, samples, sequence_length, seed: 1234, layout, masks, extra, valid_rest, surplus: 0.005, cache: Cache::Beside, pad: 0 }
    }
}

/// Why there are no samples.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages say what variants and their fields are")]
pub enum Error {
    #[error(transparent)]
    Indexed(#[from] IndexedError),
    #[error(transparent)]
    Mask(#[from] MaskError),
    #[error(transparent)]
    Split(#[from] SplitError),
    #[error("the blend of {}: {cause}", .part.name())]
    Blend { part: Part, cause: BlendError },
    #[error("`{}`, {}: {cause}", .prefix.display(), .part.name())]
    Order { prefix: PathBuf, part: Part, cause: OrderError },
    #[error("`{}`: {cause}; orders of samples are kept there, and another folder can be named for them", .file.display())]
    Cache { file: PathBuf, cause: io::Error },
    #[error("sample {n} is asked for, of {samples}")]
    Beyond { n: u64, samples: u64 },
    #[error("a sample has {width} tokens, and there is room for {room}")]
    Room { width: usize, room: usize },
    #[error("{pad} fills samples, which takes {takes}")]
    Pad { pad: u32, takes: &'static str },
    #[error("a surplus of {0}; it is 0 or more")]
    Surplus(f64),
}

/// What happened while orders were built, of which a user may want to know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CacheNotice {
    /// A file is replaced, as it is damaged.
    Damaged {
        /// The damaged file of a cache.
        file: PathBuf,
        /// What is wrong with the file, for messages.
        what: String,
    },
    /// The order of a data set was built, as it was in no cache.
    Built {
        /// The data set, without the ends of its files' names.
        prefix: PathBuf,
        /// The part that the samples are of.
        part: Part,
        /// Samples that the order has.
        samples: u64,
    },
}

/// The samples of training, validation and test, where there are any, and what happened on the way.
pub struct Opened {
    /// One for each [`Part`], by its number; `None` where it has no samples.
    pub parts: [Option<Dataset>; 3],
    /// In the order of parts: orders that were built, and files that were damaged.
    pub notices: Vec<CacheNotice>,
}

/// The samples of a part, in order.
pub struct Dataset {
    sets: Vec<Set>,
    part: Part,
    mixed: Option<BlendedOrder>,
    width: usize,
    /// Tokens of documents that a packed sample has at most.
    room: u32,
    pad: u32,
    key: Hash,
    course: Hash,
    epochs: u32,
}

struct Set {
    tokens: Arc<Indexed>,
    mask: Option<Arc<Mask>>,
    /// Its documents that are used.
    documents: Range<u64>,
    order: Arranged,
    /// What the order follows from, without the number of samples.
    course: Hash,
    epochs: u32,
}

/// Documents as samples.
enum Arranged {
    Stream(Order),
    Packed(Packed),
}

/// An order that is to be built or read.
struct Task {
    prefix: PathBuf,
    part: Part,
    tokens: Arc<Indexed>,
    mask: Option<Arc<Mask>>,
    rule: Rule,
}

/// Opens all data sets of a request and builds the orders of their samples, or reads those that were built before.
///
/// # Errors
/// A data set that cannot be read or has nothing for a part; a blend that takes more samples of a data set than were
/// made; orders that cannot be kept.
pub fn open(request: &Request) -> Result<Opened, Error> {
    if !(request.surplus >= 0.0 && request.surplus.is_finite()) {
        return Err(Error::Surplus(request.surplus));
    }
    let plans = Part::ALL.map(|part| plan(request, part));
    let mut opened: BTreeMap<PathBuf, Files> = BTreeMap::new();
    let mut tasks = vec![];
    let mut blends = vec![];
    for (part, plan) in Part::ALL.into_iter().zip(plans) {
        let Some(plan) = plan? else { continue };
        for (prefix, samples) in plan.blend.prefixes.iter().zip(&plan.samples) {
            let prefix = bare(prefix);
            let (tokens, mask) = match opened.get(&prefix) {
                Some(files) => files.clone(),
                None => files(&prefix, request.masks)?,
            };
            opened.insert(prefix.clone(), (tokens.clone(), mask.clone()));
            let documents = plan.split.sequences(part, tokens.sequences()).unwrap_or(0..0);
            let rest = if part == Part::Valid { request.valid_rest } else { Remainder::Dropped };
            let (sequence_length, seed, extra) = (request.sequence_length, request.seed, request.extra);
            let rule = Rule { sequence_length, extra, rest, seed, samples: *samples, documents };
            tasks.push(Task { prefix, part, tokens, mask, rule });
        }
        blends.push((part, plan));
    }
    let mut notices = vec![];
    let mut orders = cores::queue(tasks, |task| order(request, task)).into_iter();
    let mut parts = [const { None }; 3];
    for (part, plan) in blends {
        let mut sets: Vec<Set> = vec![];
        let (mut hasher, mut course) = (blake3::Hasher::new(), blake3::Hasher::new());
        for made in orders.by_ref().take(plan.samples.len()) {
            let (set, key, happened) = made?;
            hasher.update(key.as_bytes());
            course.update(set.course.as_bytes());
            notices.extend(happened);
            sets.push(set);
        }
        let mixed = mix(request, part, &plan, &sets, &mut notices)?;
        for weight in plan.blend.weights.iter().flatten() {
            hasher.update(&weight.to_le_bytes());
            course.update(&weight.to_le_bytes());
        }
        hasher.update(&plan.size.unwrap_or(u64::MAX).to_le_bytes());
        let width = request.sequence_length as usize + request.extra.tokens() as usize;
        let epochs = sets.iter().map(|s| s.epochs).max().unwrap_or(0);
        let (key, course) = (hasher.finalize(), course.finalize());
        parts[part as usize] = Some(Dataset { sets, part, mixed, width, room: request.sequence_length, pad: request.pad, key, course, epochs });
    }
    Ok(Opened { parts, notices })
}

/// A data set's tokens, and their mask if one is asked for.
type Files = (Arc<Indexed>, Option<Arc<Mask>>);

fn files(prefix: &Path, masks: Masks) -> Result<Files, Error> {
    let tokens = Indexed::open(prefix)?;
    let mask = match masks {
        Masks::Nowhere => None,
        Masks::Beside => Some(Arc::new(Mask::open(&tokens)?)),
    };
    Ok((Arc::new(tokens), mask))
}

/// What a part is made of.
struct Plan {
    blend: Blend,
    split: Split,
    /// Samples that are made of each data set.
    samples: Vec<Option<u64>>,
    /// Of the part.
    size: Option<u64>,
    /// Whether samples are of one data set, in its own order.
    plain: bool,
}

/// Plans a part as `BlendedMegatronDatasetBuilder` does; none where the part has nothing.
fn plan(request: &Request, part: Part) -> Result<Option<Plan>, Error> {
    let (blend, split) = match &request.source {
        Source::Shared { blend, split } => (blend.clone(), split.clone()),
        Source::Own(blends) => match &blends[part as usize] {
            Some(blend) => (blend.clone(), Split::all_for(part)),
            None => return Ok(None),
        },
    };
    let wrong = |cause| Error::Blend { part, cause };
    blend.check().map_err(wrong)?;
    if split.0[part as usize].is_none() {
        return Ok(None);
    }
    let size = request.samples[part as usize];
    let plain = blend.prefixes.len() == 1 && (blend.weights.is_none() || matches!(request.source, Source::Own(_)));
    if plain {
        return Ok(Some(Plan { blend, split, samples: vec![size], size, plain }));
    }
    let Some(weights) = &blend.weights else {
        let samples = vec![None; blend.prefixes.len()];
        return Ok(Some(Plan { blend, split, samples, size, plain }));
    };
    let asked = size.ok_or_else(|| wrong(BlendError::Unsized))?;
    let (used, made): (Vec<u64>, Vec<u64>) = sizes(weights, asked, request.surplus).into_iter().unzip();
    let size = used.into_iter().try_fold(0u64, u64::checked_add);
    let samples = made.into_iter().map(Some).collect();
    Ok(Some(Plan { blend, split, samples, size: size.or(Some(u64::MAX)), plain }))
}

/// Which data set each sample is of: reads it or finds it out.
fn mix(request: &Request, part: Part, plan: &Plan, sets: &[Set], notices: &mut Vec<CacheNotice>) -> Result<Option<BlendedOrder>, Error> {
    let wrong = |cause| Error::Blend { part, cause };
    if plan.plain {
        return Ok(None);
    }
    let few = |n: u64| u32::try_from(n).ok().filter(|n| *n <= MOST).ok_or_else(|| wrong(BlendError::Large(n)));
    let (weights, samples) = match &plan.blend.weights {
        Some(weights) => (normalized(weights), Some(few(plan.size.unwrap_or(0))?)),
        None => {
            if let Some(empty) = sets.iter().find(|s| s.order.is_empty()) {
                return Err(wrong(BlendError::Empty(empty.tokens.prefix().into())));
            }
            let all = sets.iter().try_fold(0u64, |sum, s| sum.checked_add(s.order.len())).unwrap_or(u64::MAX);
            let all = plan.size.map_or_else(|| few(all).map(|_| None), |size| few(size.min(all)).map(Some))?;
            (sets.iter().map(|s| s.order.len() as f64).collect(), all)
        }
    };
    let key = BlendedOrder::key(&weights, samples);
    let file = sets.first().and_then(|first| request.cache.file(first.tokens.prefix(), part, &key, "blend"));
    let read = |rows| BlendedOrder::of(rows, sets.len());
    let build = || match samples {
        Some(samples) => BlendedOrder::by_weights(&weights, samples),
        None => BlendedOrder::exhaustive(&sets.iter().map(|s| s.order.len() as u32).collect::<Vec<_>>()),
    };
    let mixed = kept(file.as_deref(), &key, notices, read, |_| Ok(build()), |mixed| &mixed.rows)?;
    for (set, takes) in sets.iter().zip(mixed.counts()) {
        let (prefix, has) = (set.tokens.prefix(), set.order.len());
        if takes > has {
            return Err(wrong(BlendError::Oversampled { prefix: prefix.into(), has, takes, surplus: request.surplus }));
        }
    }
    Ok(Some(mixed))
}

/// Reads an order or builds it.
fn order(request: &Request, task: Task) -> Result<(Set, Hash, Vec<CacheNotice>), Error> {
    let Task { prefix, part, tokens, mask, rule } = task;
    let key = cache::key(request.layout, &rule, tokens.lengths());
    let file = request.cache.file(&prefix, part, &key, request.layout.kind());
    let wrong = |cause| Error::Order { prefix: prefix.clone(), part, cause };
    let read = |rows| match request.layout {
        Layout::Stream => Order::of(rows).map(Arranged::Stream),
        Layout::Packed(overlong) => Packed::of(rows, overlong).map(Arranged::Packed),
    };
    let build = |notices: &mut Vec<CacheNotice>| {
        let order = match request.layout {
            Layout::Stream => Order::build(&rule, tokens.lengths()).map(Arranged::Stream),
            Layout::Packed(overlong) => Packed::build(&rule, overlong, tokens.lengths()).map(Arranged::Packed),
        };
        let order = order.map_err(wrong)?;
        notices.push(CacheNotice::Built { prefix: prefix.clone(), part, samples: order.len() });
        Ok(order)
    };
    let mut notices = vec![];
    let order = kept(file.as_deref(), &key, &mut notices, read, build, Arranged::rows)?;
    // Among streams with the same number of epochs, the first samples do not depend on how many are asked for. Packed
    // rows do not depend on the number of epochs either.
    let mut course = blake3::Hasher::new();
    course.update(cache::key(request.layout, &Rule { samples: None, ..rule.clone() }, tokens.lengths()).as_bytes());
    let epochs = match &order {
        Arranged::Stream(_) => {
            let Extent { epochs, before_last, .. } = Extent::of(&rule, tokens.tokens_of(&rule.documents)).map_err(wrong)?;
            course.update(&epochs.to_le_bytes()).update(&before_last.unwrap_or(u32::MAX).to_le_bytes());
            epochs
        }
        Arranged::Packed(packed) => packed.epochs(),
    };
    course.update(tokens.sampled().as_bytes());
    if let Some(mask) = &mask {
        course.update(b"a mask").update(mask.sampled().as_bytes());
    }
    Ok((Set { tokens, mask, documents: rule.documents, order, course: course.finalize(), epochs }, key, notices))
}

impl Layout {
    /// Extension of the files of a cache.
    fn kind(self) -> &'static str {
        match self {
            Layout::Stream => "order",
            Layout::Packed(_) => "packing",
        }
    }
}

impl Arranged {
    fn rows(&self) -> &Rows {
        match self {
            Arranged::Stream(order) => &order.rows,
            Arranged::Packed(packed) => &packed.rows,
        }
    }

    /// Samples.
    fn len(&self) -> u64 {
        match self {
            Arranged::Stream(order) => order.len(),
            Arranged::Packed(packed) => packed.len(),
        }
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a file of a cache has, else what is built and then kept there.
fn kept<T>(
    file: Option<&Path>,
    key: &Hash,
    notices: &mut Vec<CacheNotice>,
    read: impl Fn(Rows) -> Option<T>,
    build: impl FnOnce(&mut Vec<CacheNotice>) -> Result<T, Error>,
    rows: impl FnOnce(&T) -> &Rows,
) -> Result<T, Error> {
    let Some(file) = file else { return build(notices) };
    let failed = |cause| Error::Cache { file: file.into(), cause };
    let found = |found| match found {
        CachedRows::Rows(rows) => read(rows).ok_or(Some("its rows do not fit each other".to_string())),
        CachedRows::Damaged(what) => Err(Some(what)),
        CachedRows::Missing => Err(None),
    };
    match found(cache::read(file, key).map_err(failed)?) {
        Ok(made) => return Ok(made),
        Err(damage) => notices.extend(damage.map(|what| CacheNotice::Damaged { file: file.into(), what })),
    }
    // All processes of a machine need the order at the same time, so one of them builds it for all.
    let lock = machine::lock(&key.to_hex());
    if lock.has_waited
        && let Ok(made) = found(cache::read(file, key).map_err(failed)?)
    {
        return Ok(made);
    }
    let made = build(notices)?;
    cache::write(file, key, rows(&made)).map_err(failed)?;
    // All processes that map the file share its memory, so this one drops its own copy.
    drop(made);
    let lost = || failed(io::Error::other("it was changed while it was written"));
    found(cache::read(file, key).map_err(failed)?).map_err(|_| lost())
}

impl Cache {
    fn file(&self, prefix: &Path, part: Part, key: &Hash, kind: &str) -> Option<PathBuf> {
        let name = format!("{}-{}.{kind}", part.name(), &key.to_hex()[..32]);
        match self {
            Cache::Beside => Some(with(prefix, ".cache").join(name)),
            Cache::Folder(folder) => Some(folder.join(name)),
            Cache::Nowhere => None,
        }
    }
}

impl Dataset {
    /// Samples.
    pub fn len(&self) -> u64 {
        self.mixed.as_ref().map_or_else(|| self.sets[0].order.len(), BlendedOrder::len)
    }

    /// Whether there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of a sample, with the extra one.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Key of the samples and their order: the hash of all that they follow from, without the tokens.
    pub fn key(&self) -> Hash {
        self.key
    }

    /// By what the tokens and their order are known again, however many samples are asked for: that of those which
    /// both have. What is asked for may need another number of epochs, which are shuffled together; then it differs.
    pub fn course(&self) -> Hash {
        self.course
    }

    /// Epochs that are shuffled together, of the data set with the most.
    pub fn epochs(&self) -> u32 {
        self.epochs
    }

    /// The data sets of the blend.
    pub fn sets(&self) -> impl Iterator<Item = &Indexed> {
        self.sets.iter().map(|s| &*s.tokens)
    }

    /// The orders of those data sets whose samples are cut of a stream.
    pub fn orders(&self) -> impl Iterator<Item = &Order> {
        self.sets.iter().filter_map(|s| match &s.order {
            Arranged::Stream(order) => Some(order),
            Arranged::Packed(_) => None,
        })
    }

    /// What packing made of all documents, if they are packed.
    pub fn packing(&self) -> Option<Statistics> {
        let packed = self.sets.iter().filter_map(|s| match &s.order {
            Arranged::Stream(_) => None,
            Arranged::Packed(packed) => Some((s.tokens.lengths(), &s.documents, packed)),
        });
        let packed: Vec<_> = packed.collect();
        (!packed.is_empty()).then(|| packing::statistics(packed.into_iter(), self.room))
    }

    /// The data set of sample number n, and which of its samples that is.
    pub fn set(&self, n: u64) -> Option<(usize, u64)> {
        match &self.mixed {
            Some(mixed) => mixed.get(n),
            None => Some((0, n)).filter(|_| n < self.len()),
        }
    }
}

#[cfg(test)]
mod tests;
