use super::*;
use crate::data::{Data, LoadRegions};
use data::indexed::{Dtype, Writer};
use ir::dim::Order;
use ir::graph::InputDefault;
use ir::program::Extent;
use std::fs;

const LENGTH: u64 = 4;

/// `tokens`, `[batch, 4]`, and what derives from it; the last two if documents are kept apart.
fn job(batch: u64, is_packed: bool) -> Job {
    let mut job = crate::fixture::job(&crate::fixture::Split { microbatches: 1, pp: 1, dp: 1, tp: 1 });
    let dims: Vec<Extent> = [batch, LENGTH].iter().map(|n| Extent { name: "d".into(), size: *n, padded: *n, order: Order::Plain }).collect();
    let takes = |least, most| Some(vec![Interval { least, most }]);
    let entry = |name: &str, default, takes| InputEntry { name: name.into(), dtype: DType::I32, dims: dims.clone(), default, takes };
    job.inputs = vec![entry("tokens", None, takes(0, 999)), entry("targets", Some(InputDefault::Next(0)), takes(-100, 999))];
    if is_packed {
        job.inputs.push(entry("document", Some(InputDefault::Documents(0, 0)), takes(0, 9)));
        job.inputs.push(entry("position", Some(InputDefault::Positions(0, 0)), takes(0, 9)));
    }
    // The program loads each of these inputs.
    let commands = &mut job.programs[0].bodies.iter_mut().map(|b| &mut b.commands).find(|c| c.iter().any(is_load)).unwrap();
    let load = commands.iter().find(|c| is_load(c)).cloned().unwrap();
    commands.retain(|c| !is_load(c));
    for k in 0..job.inputs.len() as u32 {
        let mut load = load.clone();
        if let ir::program::Action::Load { input, .. } = &mut load.action {
            *input = k;
        }
        commands.push(load);
    }
    job.global_batch = batch;
    job
}

fn is_load(command: &ir::program::Command) -> bool {
    matches!(command.action, ir::program::Action::Load { .. })
}

/// Writes documents whose tokens are all different, of these lengths.
fn write(folder: &Path, name: &str, lengths: &[u32], first: u32) -> String {
    let prefix = folder.join(name);
    let mut out = Writer::create(&prefix, Dtype::U16).unwrap();
    let mut token = first;
    for length in lengths {
        let tokens: Vec<u32> = (token..token + length).collect();
        token += length;
        out.document(&tokens, &[tokens.len()]).unwrap();
    }
    out.finish().unwrap();
    prefix.to_str().unwrap().into()
}

fn sets(blend: &[&str], split: &str) -> DataSets {
    let blend = blend.iter().map(|w| (*w).to_owned()).collect();
    DataSets {
        names: SetNames::Shared { blend, split: split.into() },
        cache: None,
        validation: Validation::default(),
        packing: None,
        is_masked: false,
    }
}

fn training(sets: &DataSets, job: &Job, seed: u64, samples: u64) -> Samples {
    let RunSamples { training, .. } = sets.open(job, seed, [samples, 0, 0]).unwrap();
    training.unwrap()
}

fn rows(data: &Data, step: u64) -> Vec<Vec<f64>> {
    data.batch(step).unwrap().into_iter().map(|tensor| tensor.data).collect()
}

#[test]
fn a_step_is_fed_the_samples_that_follow_those_before() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (write(dir.path(), "a", &[7, 3, 9, 5, 8], 1), write(dir.path(), "b", &[20, 21], 100));
    let sets = sets(&["0.7", &a, "0.3", &b], "1,0,0");
    let of = |batch: u64| Data::of_samples(&job(batch, false), training(&sets, &job(batch, false), 5, 24)).unwrap();
    let samples = training(&sets, &job(1, false), 5, 24);
    let expected = |n: u64| {
        let (mut tokens, mut pieces) = (vec![0i64; 5], vec![]);
        samples.set.sample(n, &mut tokens, &mut pieces).unwrap();
        tokens.into_iter().map(|t| t as f64).collect::<Vec<_>>()
    };
    for step in 0..12 {
        let [first, second] = [2 * step, 2 * step + 1].map(expected);
        let found = rows(&of(2), step);
        assert_eq!(found[0], [&first[..4], &second[..4]].concat());
        assert_eq!(found[1], [&first[1..], &second[1..]].concat());
    }
    // Steps of three sequences follow four steps of two and one sequence that is left out.
    let later = of(3).after((4, 9)).unwrap();
    for step in 4..9 {
        let first = 9 + 3 * (step - 4);
        let expected: Vec<f64> = (first..first + 3).flat_map(|n| expected(n)[..4].to_vec()).collect();
        assert_eq!(rows(&later, step)[0], expected);
    }
    let error = of(2).batch(1 << 40).unwrap_err().to_string();
    assert!(error.contains("sample 2199023255552 is asked for"), "{error}");
}

#[test]
fn what_is_wanted_is_read_alone() {
    let dir = tempfile::tempdir().unwrap();
    let a = write(dir.path(), "a", &[7, 30, 9], 1);
    let (job, sets) = (job(2, false), sets(&[&a], "1,0,0"));
    let data = Data::of_samples(&job, training(&sets, &job, 0, 4)).unwrap();
    let whole = LoadRegions::all(&job.inputs);
    // Each token of both rows is read once, though it is both token and label.
    assert_eq!(data.read(0, &whole).unwrap().bytes, 2 * 5 * 2);
}

#[test]
fn documents_are_apart_where_the_model_keeps_them_so() {
    let dir = tempfile::tempdir().unwrap();
    let a = write(dir.path(), "a", &[2, 3, 4], 1);
    let sets = sets(&[&a], "1,0,0");
    let packed = job(1, true);
    let samples = training(&sets, &packed, 0, 2);
    let (mut tokens, mut pieces) = (vec![0i64; 5], vec![]);
    samples.set.sample(0, &mut tokens, &mut pieces).unwrap();
    let of = |at: u32| pieces.iter().rposition(|p| p.at <= at).unwrap();
    let expected: [Vec<f64>; 3] = [
        (0..4).map(|at| if of(at) == of(at + 1) { tokens[at as usize + 1] as f64 } else { -100.0 }).collect(),
        (0..4).map(|at| of(at) as f64).collect(),
        (0..4).map(|at| f64::from(at - pieces[of(at)].at)).collect(),
    ];
    assert!(expected[0].contains(&-100.0));
    assert_eq!(rows(&Data::of_samples(&packed, samples).unwrap(), 0)[1..], expected);
    // Where no input asks for documents, a sample is a stream of tokens, as in Megatron-LM.
    let plain = job(1, false);
    let found = rows(&Data::of_samples(&plain, training(&sets, &plain, 0, 2)).unwrap(), 0);
    assert_eq!(found[1], tokens[1..].iter().map(|t| *t as f64).collect::<Vec<_>>());
}

#[test]
fn a_token_beyond_the_vocabulary_is_named_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let a = write(dir.path(), "a", &[6, 6], 995);
    let job = job(1, false);
    let data = Data::of_samples(&job, training(&sets(&[&a], "1,0,0"), &job, 0, 2)).unwrap();
    let error = (0..2).find_map(|step| data.batch(step).err()).unwrap().to_string();
    let says = format!("`{a}.bin`, byte 10: token 5 of document 0 is 1000, in sample ");
    assert!(error.starts_with(&says) && error.ends_with("but `tokens` takes 0 to 999") || error.contains("document 1 is 100"), "{error}");
}

#[test]
fn data_are_known_again_by_their_tokens_and_their_order() {
    let dir = tempfile::tempdir().unwrap();
    let a = write(dir.path(), "a", &[7, 30, 9, 50], 1);
    let (job, plain) = (job(1, false), sets(&[&a], "1,0,0"));
    let mark = |sets: &DataSets, seed, samples| training(sets, &job, seed, samples).mark("tokens").hash;
    let first = mark(&plain, 0, 4);
    // More samples of one epoch leave the first ones as they are, but samples of two epochs are shuffled together.
    assert_eq!(mark(&plain, 0, 9), first);
    for other in [mark(&plain, 1, 4), mark(&sets(&[&a], "3,1,0"), 0, 4), mark(&plain, 0, 60), mark(&sets(&["1", &a], "3,1,0"), 0, 4)] {
        assert_ne!(other, first);
    }
    let moved = write(dir.path(), "moved", &[7, 30, 9, 50], 1);
    assert_eq!(mark(&sets(&[&moved], "1,0,0"), 0, 4), first);
    let same_lengths = write(dir.path(), "b", &[7, 30, 9, 50], 2);
    assert_ne!(mark(&sets(&[&same_lengths], "1,0,0"), 0, 4), first);
}

#[test]
fn what_cannot_be_trained_on_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (write(dir.path(), "a", &[7, 30], 1), write(dir.path(), "b", &[9, 9], 1));
    let plain = job(1, false);
    let says = |sets: &DataSets, job: &Job, seed, samples| sets.settled().and_then(|s| s.open(job, seed, samples)).err().unwrap().to_string();
    let of = |words: &[&str], samples| says(&sets(words, "1,0,0"), &plain, 0, samples);
    let unpaired = sets(&["0.5", &a, &b], "1,0,0").settled().and_then(|s| s.open(&plain, 0, [1, 0, 0])).err().unwrap();
    assert!(unpaired.to_string().contains("there is no data set") && unpaired.help().unwrap().to_string().starts_with("`0.5` is no weight here"));
    let folder = sets(&[dir.path().to_str().unwrap()], "1,0,0").open(&plain, 0, [1, 0, 0]).err().unwrap();
    assert!(folder.help().unwrap().to_string().ends_with("/*' stands for all data sets in it"));
    assert!(says(&sets(&[&a], "0,1,0"), &plain, 0, [1, 0, 0]).contains("the split `0,1,0` leaves nothing for training"));
    assert!(of(&[&a, &b], [99, 0, 0]).contains("the run takes 99: give each a weight"));
    assert!(says(&sets(&[&a], "1,x,0"), &plain, 0, [1, 0, 0]).contains("`x` is no number"));
    assert!(says(&sets(&[&a], "1,0,0"), &plain, 1 << 32, [1, 0, 0]).contains("is not below 2^32"));
    let missing = dir.path().join("c*").display().to_string();
    assert!(of(&[&missing], [1, 0, 0]).contains("no data set matches"));
    let mut floats = plain.clone();
    floats.inputs[0].dtype = DType::F32;
    assert!(says(&sets(&[&a], "1,0,0"), &floats, 0, [1, 0, 0]).contains("`tokens` has 2 dims of f32: pass --data tokens=FILE.npy"));
    // These files are not as they were written.
    let bin = format!("{a}.bin");
    let whole = fs::read(&bin).unwrap();
    fs::write(&bin, &whole[..whole.len() - 2]).unwrap();
    assert!(of(&[&a], [1, 0, 0]).contains("a.bin` ends at byte 72"), "{}", of(&[&a], [1, 0, 0]));
    fs::write(&bin, whole).unwrap();
    let idx = format!("{a}.idx");
    let mut index = fs::read(&idx).unwrap();
    index[9] = 2;
    fs::write(&idx, index).unwrap();
    assert!(of(&[&a], [1, 0, 0]).contains("a.idx`, byte 9: it is of version 2"));
    fs::remove_file(&idx).unwrap();
    assert!(of(&[&a], [1, 0, 0]).contains("a.bin` is there and"));
}

/// The mask of a data set of documents of these lengths: every third token counts for nothing.
fn write_mask(prefix: &str, lengths: &[u32], least: u32) {
    let mut out = Writer::create(&data::mask::prefix(Path::new(prefix)), Dtype::U8).unwrap();
    for length in lengths {
        let counts: Vec<u32> = (0..*length).map(|k| least + u32::from(k % 3 < 2)).collect();
        out.document(&counts, &[counts.len()]).unwrap();
    }
    out.finish().unwrap();
}

#[test]
fn labels_are_those_of_whole_documents_that_the_mask_counts() {
    let dir = tempfile::tempdir().unwrap();
    let lengths = [2, 3, 1, 6, 2];
    let a = write(dir.path(), "a", &lengths, 1);
    write_mask(&a, &lengths, 0);
    let (cut, split) = (Some(Overlong::Cut), Some(Overlong::Split));
    for (packing, is_masked) in [(cut, false), (cut, true), (None, true), (split, false), (split, true)] {
        let sets = DataSets { packing, is_masked, ..sets(&[&a], "1,0,0") };
        let job = job(1, true);
        let samples = training(&sets, &job, 3, 3);
        let held: Vec<_> = (0..3)
            .map(|n| {
                let (mut tokens, mut pieces, mut counted) = (vec![0i64; 5], vec![], vec![0; 5]);
                let sample = samples.set.sample(n, &mut tokens, &mut pieces).unwrap();
                samples.set.counted(&sample, std::slice::from_ref(&(0..5)), &pieces, &mut counted).unwrap();
                (tokens, pieces, counted, sample.tokens)
            })
            .collect();
        let data = Data::of_samples(&job, samples).unwrap();
        for (step, (tokens, pieces, counted, end)) in held.into_iter().enumerate() {
            // `of` is the number of a token's document; what fills the row up counts as one more.
            let of = |at: usize| if at < end { pieces.iter().rposition(|p| p.at as usize <= at).unwrap() } else { pieces.len() };
            let label = |at: usize| of(at) == of(at + 1) && at + 1 < end && counted[at + 1] == 1;
            let found = rows(&data, step as u64);
            assert_eq!(found[0], tokens[..4].iter().map(|t| *t as f64).collect::<Vec<_>>());
            assert_eq!(found[1], (0..4).map(|at| if label(at) { tokens[at + 1] as f64 } else { -100.0 }).collect::<Vec<_>>());
            // The row is filled up with token 0, which is also the separator here, so document numbers go on.
            assert!((0..end.min(4)).all(|at| found[2][at] == of(at) as f64 && found[3][at] == (at as u32 - pieces[of(at)].at) as f64));
            assert!((end..4).all(|at| found[2][at] >= pieces.len() as f64));
            assert!(packing != cut || pieces.iter().all(|p| p.from == 0));
        }
    }
}

#[test]
fn what_cannot_be_packed_or_masked_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let a = write(dir.path(), "a", &[2, 3], 1);
    let says = |sets: &DataSets, job: &Job| {
        let opened = sets.open(job, 0, [1, 0, 0]).and_then(|opened| Data::of_samples(job, opened.training.unwrap()));
        opened.and_then(|data| data.batch(0)).err().map(|e| e.to_string()).unwrap_or_default()
    };
    let packed = DataSets { packing: Some(Overlong::Cut), ..sets(&[&a], "1,0,0") };
    let masked = DataSets { is_masked: true, ..sets(&[&a], "1,0,0") };
    assert!(says(&packed, &job(1, false)).contains("does not keep them apart: compile it with -D packed=true"));
    assert_eq!(says(&packed, &job(1, true)), "");
    assert!(says(&masked, &job(1, false)).contains("has no loss mask"));
    write_mask(&a, &[2, 3], 1);
    let text = says(&masked, &job(1, false));
    assert!(text.contains("a.mask.bin`, byte ") && text.contains("is 2; it is 0 or 1"), "{text}");
    let mut all_count = job(1, true);
    all_count.inputs[1].takes = Some(vec![Interval { least: 0, most: 999 }]);
    assert!(says(&masked, &all_count).contains("and `targets` does not take that"));
    let mut unlabelled = job(1, false);
    unlabelled.inputs[1].default = Some(InputDefault::Prev(0, 0));
    assert!(says(&masked, &unlabelled).contains("takes none that follow from `tokens`"));
}

#[test]
fn packing_is_described_in_figures() {
    let dir = tempfile::tempdir().unwrap();
    let a = write(dir.path(), "a", &[4, 1, 3, 9, 4], 1);
    let sets = DataSets { packing: Some(Overlong::Cut), ..sets(&[&a], "1,0,0") };
    let said = |samples| training(&sets, &job(1, true), 3, samples).packing().unwrap();
    let split = DataSets { packing: Some(Overlong::Split), ..sets.clone() };
    let split = training(&split, &job(1, true), 3, 1).packing().unwrap();
    assert!(split.ends_with(" are packed into 6 rows of 4, 87.5 % full; split into rows: 1"), "{split}");
    let documents = "training: 5 documents of 4.2 tokens (median 4, longest 9) are packed into";
    let cut = "100.0 % full; cut to a row: 1, which leaves out 23.8 % of all tokens (--packing=split keeps them)";
    assert_eq!(said(1), format!("{documents} 4 rows of 4, {cut}"));
    assert_eq!(said(6), format!("{documents} 8 rows of 4 in 2 epochs, {cut}"));
}
