//! Orders of samples, held to those that megatron-core itself made (`fixtures/make.py`).

use data::blend::Blend;
use data::dataset::{self, Cache, CacheNotice, Dataset, Error, Request, Source};
use data::indexed::{Dtype, Writer, paths};
use data::order::{ExtraToken, Remainder};
use data::split::Split;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// The generator of `make.py`.
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

fn number(of: &Value, name: &str) -> u64 {
    of[name].as_u64().unwrap_or_else(|| panic!("{name} is a number"))
}

/// The data set that `make.py` has Megatron's builder write.
fn build(prefix: &Path, spec: &Value) {
    let mut draw = Draw(number(spec, "seed"));
    let dtype = Dtype::ALL.into_iter().find(|d| u64::from(d.code()) == number(spec, "dtype")).expect("a type");
    let mut writer = Writer::create(prefix, dtype).expect("a writer");
    let (shortest, longest, vocabulary) = (number(spec, "shortest"), number(spec, "longest"), number(spec, "vocabulary"));
    for _ in 0..number(spec, "sequences") {
        let length = shortest + draw.below(longest - shortest + 1);
        let tokens: Vec<u32> = (0..length).map(|_| draw.below(vocabulary) as u32).collect();
        writer.sequence(&tokens).expect("written");
        if draw.below(3) != 0 {
            writer.end_document();
        }
    }
    writer.end_document();
    writer.finish().expect("written");
}

fn digest(numbers: impl IntoIterator<Item = i64>) -> String {
    let bytes: Vec<u8> = numbers.into_iter().flat_map(i64::to_le_bytes).collect();
    blake3::hash(&bytes).to_hex()[..32].into()
}

fn request(c: &Value, prefixes: Vec<PathBuf>, folder: &Path) -> Request {
    let weights = c["weights"].as_array().map(|w| w.iter().map(|w| w.as_f64().expect("a weight")).collect());
    let blend = Blend { prefixes, weights };
    let source = match c["per_split"].as_bool() {
        Some(true) => Source::Own([Some(blend.clone()), Some(blend), None]),
        _ => Source::Shared { blend, split: Split::parse(c["split"].as_str().expect("a split")).expect("a split") },
    };
    let samples = std::array::from_fn(|k| c["sizes"][k].as_u64());
    Request {
        seed: number(c, "seed") as u32,
        extra: if c["extra"].as_bool() == Some(true) { ExtraToken::Included } else { ExtraToken::Omitted },
        valid_rest: if c["keep_rest"].as_bool() == Some(true) { Remainder::Kept } else { Remainder::Dropped },
        surplus: c["surplus"].as_f64().expect("a number"),
        cache: Cache::Folder(folder.join("cache")),
        ..Request::new(source, samples, number(c, "sequence_length") as u32)
    }
}

/// What `make.py` says of a data set of Megatron's.
fn described(set: &Dataset, blended: bool) -> Value {
    let mut hasher = blake3::Hasher::new();
    let (mut tokens, mut pieces, mut heads) = (vec![0i64; set.width()], vec![], vec![]);
    for n in 0..set.len() {
        let sample = set.sample(n, &mut tokens, &mut pieces).expect("a sample");
        // Megatron fills samples with -1 if the tokenizer names no padding token.
        tokens[sample.tokens..].fill(-1);
        tokens.iter().chain(&pieces.iter().map(|p| i64::from(p.document)).collect::<Vec<_>>()).for_each(|t| {
            hasher.update(&t.to_le_bytes());
        });
        if n < 3 {
            heads.push(tokens[..tokens.len().min(8)].to_vec());
        }
    }
    let orders = set.orders().map(|o| {
        let row = |numbers: Vec<u32>| digest(numbers.into_iter().map(i64::from));
        serde_json::json!([o.len(), row(o.documents().collect()), row(o.samples().collect()), row(o.shuffle().collect())])
    });
    let orders: Vec<_> = orders.take(4).collect();
    let mut out = serde_json::json!({"samples": set.len(), "hash": hasher.finalize().to_hex()[..32], "heads": heads});
    if blended {
        let places: Vec<(usize, u64)> = (0..set.len()).map(|n| set.set(n).expect("a sample")).collect();
        out["sets"] = digest(places.iter().map(|p| p.0 as i64)).into();
        out["own"] = digest(places.iter().map(|p| p.1 as i64)).into();
    }
    out["orders"] = orders.into();
    out
}

#[test]
fn a_hundred_random_configurations_have_megatrons_order() {
    let all: Vec<Value> = serde_json::from_str(include_str!("fixtures/orders.json")).expect("JSON");
    assert_eq!(all.len(), 100);
    for (number, c) in all.iter().enumerate() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut files = blake3::Hasher::new();
        let mut prefixes = vec![];
        for (k, spec) in c["sets"].as_array().expect("data sets").iter().enumerate() {
            let prefix = folder.path().join(format!("set{k}"));
            build(&prefix, spec);
            let (bin, idx) = paths(&prefix);
            files.update(&fs::read(bin).expect("tokens")).update(&fs::read(idx).expect("an index"));
            prefixes.push(prefix);
        }
        assert_eq!(c["files"], files.finalize().to_hex()[..32], "{number}: the files are those of Megatron's builder");
        let request = request(c, prefixes, folder.path());
        if c["refused"].is_string() {
            let error = dataset::open(&request).err().expect("refused as by Megatron").to_string();
            assert!(error.contains("a larger surplus makes more"), "{error}");
            continue;
        }
        // The second round reads from the cache, and the third has no cache.
        for round in 0..3 {
            let cache = if round == 2 { Cache::Nowhere } else { request.cache.clone() };
            let opened = dataset::open(&Request { cache, ..request.clone() }).unwrap_or_else(|e| panic!("{number}: {e}\n{c}"));
            assert_eq!(opened.notices.is_empty(), round == 1, "{number}: {:?}", opened.notices);
            for (k, part) in opened.parts.iter().enumerate() {
                let expected = &c["parts"][k];
                let found = part.as_ref().map_or(Value::Null, |set| described(set, expected["sets"].is_string()));
                assert_eq!(found, *expected, "configuration {number}, part {k}: {request:?}");
            }
        }
    }
}

#[test]
fn a_damaged_cache_is_refused_and_built_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("x");
    build(&prefix, &serde_json::json!({"seed": 5, "dtype": 8, "sequences": 30, "shortest": 1, "longest": 9, "vocabulary": 100}));
    let blend = Blend { prefixes: vec![prefix.clone()], weights: None };
    let source = Source::Shared { blend, split: Split::parse("1").expect("a split") };
    let request = Request::new(source, [Some(40), None, None], 4);
    let samples = |opened: &dataset::Opened| described(opened.parts[0].as_ref().expect("samples"), false);
    let first = dataset::open(&request).expect("opened");
    let files: Vec<PathBuf> = fs::read_dir(folder.path().join("x.cache")).expect("a cache").map(|e| e.expect("a file").path()).collect();
    assert_eq!(files.len(), 1);
    let mut bytes = fs::read(&files[0]).expect("an order");
    bytes[100] ^= 1;
    fs::remove_file(&files[0]).and_then(|()| fs::write(&files[0], bytes)).expect("written");
    let again = dataset::open(&request).expect("opened");
    let what = "its hash is not that of its content".into();
    assert_eq!(again.notices[0], CacheNotice::Damaged { file: files[0].clone(), what });
    assert_eq!(samples(&again), samples(&first));
    assert!(dataset::open(&request).expect("opened").notices.is_empty());
}

#[test]
fn what_cannot_be_asked_for_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("x");
    build(&prefix, &serde_json::json!({"seed": 5, "dtype": 8, "sequences": 3, "shortest": 5, "longest": 5, "vocabulary": 100}));
    let with = |split: &str, weights, samples| {
        let blend = Blend { prefixes: vec![prefix.clone()], weights };
        let source = Source::Shared { blend, split: Split::parse(split).expect("a split") };
        Request { cache: Cache::Nowhere, ..Request::new(source, samples, 4) }
    };
    let said = |request: &Request| dataset::open(request).err().expect("refused").to_string().replace(&format!("{}/", folder.path().display()), "");
    assert_eq!(
        said(&with("99,1", None, [Some(1); 3])),
        "`x`, valid: the split leaves it no document; give this part more of the split or nothing (as in 95,5,0), or leave out the data set"
    );
    assert_eq!(said(&with("1", Some(vec![1.0]), [None; 3])), "the blend of train: weights need a number of samples that is to be drawn by them");
    let opened = dataset::open(&with("1", None, [None; 3])).expect("opened");
    let set = opened.parts[0].as_ref().expect("samples");
    let error = |e: Error| e.to_string();
    assert_eq!(set.sample(3, &mut [0u32; 5], &mut vec![]).map_err(error), Err("sample 3 is asked for, of 3".into()));
    assert_eq!(set.sample(0, &mut [0u32; 4], &mut vec![]).map_err(error), Err("a sample has 5 tokens, and there is room for 4".into()));
    fn shared<T: Send + Sync>(_: &T) {}
    shared(set);
}
