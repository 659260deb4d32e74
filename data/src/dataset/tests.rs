//! Packed documents and masks. Orders of streams are held to Megatron's in `tests/orders.rs`.

use super::*;
use crate::indexed::{Dtype, Writer};
use crate::order::Overlong;
use crate::random::RandomState;
use std::fs;

/// Documents of these lengths, whose tokens say which document and which token of it they are; and their mask.
fn write(prefix: &Path, lengths: &[u32]) -> PathBuf {
    let mut tokens = Writer::create(prefix, Dtype::I32).expect("a writer");
    let mut mask = Writer::create(&crate::mask::prefix(prefix), Dtype::U8).expect("a writer");
    for (n, length) in lengths.iter().enumerate() {
        let own: Vec<u32> = (0..*length).map(|k| 1000 * n as u32 + k).collect();
        tokens.document(&own, &[own.len()]).expect("written");
        let counts: Vec<u32> = own.iter().map(|t| counts(*t)).collect();
        mask.document(&counts, &[counts.len()]).expect("written");
    }
    tokens.finish().and_then(|()| mask.finish()).expect("written");
    prefix.into()
}

/// The mask of a token.
fn counts(token: u32) -> u32 {
    u32::from(!token.is_multiple_of(3))
}

fn request(prefixes: &[&Path], weights: Option<Vec<f64>>, split: &str, samples: [Option<u64>; 3]) -> Request {
    let blend = Blend { prefixes: prefixes.iter().map(|p| p.to_path_buf()).collect(), weights };
    let source = Source::Shared { blend, split: Split::parse(split).expect("a split") };
    Request { layout: Layout::Packed(Overlong::Cut), masks: Masks::Beside, pad: 999_999, ..Request::new(source, samples, 20) }
}

fn lengths(seed: u32, count: u32) -> Vec<u32> {
    let mut random = RandomState::new(seed);
    (0..count).map(|_| random.interval(25)).collect()
}

/// A sample's documents, of which each token and its mask are looked at; and its data set.
fn documents(set: &Dataset, n: u64) -> (usize, Vec<u32>) {
    let (mut tokens, mut pieces, mut counted) = (vec![0u32; set.width()], vec![], vec![7; set.width()]);
    let sample = set.sample(n, &mut tokens, &mut pieces).expect("a sample");
    set.counted(&sample, &[0..5, 5..set.width()], &pieces, &mut counted).expect("a mask");
    let expected: Vec<u32> = pieces
        .iter()
        .flat_map(|p| {
            let length = set.sets[sample.set].tokens.length(p.document.into()).expect("a length");
            (p.from..length).take(20).map(move |k| 1000 * p.document + k)
        })
        .collect();
    // Where a document goes on behind its row, token 20 is the label of the row's last token.
    assert_eq!(tokens[..sample.tokens.min(20)], expected);
    let is_whole = pieces.iter().all(|p| p.from + 20 >= set.sets[sample.set].tokens.length(p.document.into()).expect("a length"));
    assert!(sample.tokens <= 20 || !is_whole && tokens[20] == tokens[19] + 1);
    assert!(tokens[sample.tokens..].iter().all(|t| *t == 999_999));
    let expected = &tokens[..sample.tokens];
    let masked = expected.iter().map(|t| counts(*t) as u8).chain(std::iter::repeat_n(0, set.width() - sample.tokens));
    assert_eq!(counted, masked.collect::<Vec<u8>>());
    // Columns that are read alone have the same values.
    for columns in [&[3..9, 12..13][..], &[0..1, 15..21]] {
        let (mut part, mut few) = (vec![0u32; set.width()], vec![9; set.width()]);
        set.columns(n, columns, &mut part, &mut pieces).expect("columns");
        set.counted(&sample, columns, &pieces, &mut few).expect("a mask");
        for column in columns {
            assert_eq!((&part[column.clone()], &few[column.clone()]), (&tokens[column.clone()], &counted[column.clone()]));
        }
    }
    (sample.set, pieces.iter().map(|p| p.document).collect())
}

#[test]
fn each_epoch_has_each_document_of_its_part_whole_and_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let lengths = lengths(3, 200);
    let prefix = write(&folder.path().join("x"), &lengths);
    for cache in [Cache::Beside, Cache::Beside, Cache::Nowhere] {
        let opened = open(&Request { cache, ..request(&[&prefix], None, "80,20", [Some(200), None, None]) }).expect("opened");
        for (part, documents_of) in [(0, 0..160), (1, 160..200)] {
            let set = opened.parts[part].as_ref().expect("samples");
            let mut found: Vec<u32> = (0..set.len()).flat_map(|n| documents(set, n).1).collect();
            found.sort_unstable();
            let once = documents_of.filter(|d| lengths[*d as usize] > 0);
            let expected: Vec<u32> = once.flat_map(|d| std::iter::repeat_n(d, set.epochs() as usize)).collect();
            assert_eq!(found, expected, "part {part}");
            let packing = set.packing().expect("it is packed");
            assert!(packing.filled > 0.9 && packing.long > 0 && packing.rows == set.len(), "{packing:?}");
        }
        assert!(opened.parts[0].as_ref().is_some_and(|set| set.epochs() > 1));
    }
}

#[test]
fn split_documents_are_in_rows_to_their_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let lengths = [7, 61, 20, 0, 40, 3, 19, 21];
    let prefix = write(&folder.path().join("x"), &lengths);
    let split = Request { layout: Layout::Packed(Overlong::Split), ..request(&[&prefix], None, "1", [None; 3]) };
    for _ in 0..2 {
        let opened = open(&split).expect("opened");
        let set = opened.parts[0].as_ref().expect("samples");
        let (mut found, mut labels) = (vec![], 0);
        for n in 0..set.len() {
            documents(set, n);
            let (mut tokens, mut pieces) = (vec![0u32; 21], vec![]);
            let sample = set.sample(n, &mut tokens, &mut pieces).expect("a sample");
            found.extend_from_slice(&tokens[..sample.tokens.min(20)]);
            labels += sample.tokens - pieces.len();
        }
        found.sort_unstable();
        assert_eq!(found, (0..8).flat_map(|d| (0..lengths[d as usize]).map(move |k| 1000 * d + k)).collect::<Vec<u32>>());
        // Each token is a label exactly once, except the first of each document.
        assert_eq!(labels, 171 - 7);
    }
}

#[test]
fn packed_data_sets_are_blended_by_rows() {
    let folder = tempfile::tempdir().expect("a folder");
    let [a, b] = [("a", 60), ("b", 30)].map(|(name, count)| write(&folder.path().join(name), &lengths(count, count)));
    let rows = |samples| {
        let opened = open(&request(&[&a, &b], Some(vec![0.25, 0.75]), "1", [Some(samples), None, None])).expect("opened");
        let set = opened.parts[0].as_ref().expect("samples");
        ((0..samples).map(|n| documents(set, n)).collect::<Vec<_>>(), set.course())
    };
    let (many, course) = rows(100);
    assert_eq!(many.iter().filter(|(set, _)| *set == 0).count(), 25);
    // Fewer rows are the first of many, whatever the number of epochs, and have the same course.
    assert_eq!(rows(7), (many[..7].to_vec(), course));
    // Without weights all rows of one epoch are read.
    let opened = open(&request(&[&a, &b], None, "1", [None; 3])).expect("opened");
    let set = opened.parts[0].as_ref().expect("samples");
    let mut found: Vec<_> = (0..set.len())
        .flat_map(|n| {
            let (set, all) = documents(set, n);
            all.into_iter().map(move |d| (set, d))
        })
        .collect();
    let count = found.len();
    found.sort_unstable();
    found.dedup();
    assert_eq!(found.len(), count);
}

#[test]
fn what_packed_samples_follow_from_is_known_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = write(&folder.path().join("x"), &lengths(5, 50));
    let plain = request(&[&prefix], None, "1", [Some(5), None, None]);
    let course = |request: &Request| open(request).expect("opened").parts[0].as_ref().expect("samples").course();
    let first = course(&plain);
    let others = [
        Request { seed: 1, ..plain.clone() },
        Request { masks: Masks::Nowhere, ..plain.clone() },
        Request { layout: Layout::Stream, ..plain.clone() },
        Request { sequence_length: 21, ..plain.clone() },
        request(&[&prefix], None, "1,1", [Some(5), None, None]),
    ];
    assert!(others.iter().all(|other| course(other) != first));
    assert_eq!(course(&Request { samples: [Some(300), None, None], ..plain }), first);
}

#[test]
fn damaged_caches_of_packed_samples_are_built_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = write(&folder.path().join("x"), &lengths(9, 40));
    let request = request(&[&prefix], None, "1", [Some(30), None, None]);
    let rows = || {
        let opened = open(&request).expect("opened");
        let set = opened.parts[0].as_ref().expect("samples");
        ((0..set.len()).map(|n| documents(set, n).1).collect::<Vec<_>>(), opened.notices)
    };
    let (whole, _) = rows();
    let file = fs::read_dir(folder.path().join("x.cache")).expect("a cache").next().expect("one").expect("a file").path();
    assert!(file.extension().is_some_and(|e| e == "packing"), "{}", file.display());
    let bytes = fs::read(&file).expect("an order");
    let mut random = RandomState::new(2);
    for _ in 0..300 {
        let mut damaged = bytes.clone();
        let at = random.interval(bytes.len() as u32 - 1) as usize;
        match random.interval(2) {
            0 => damaged.truncate(at),
            1 => damaged[at] ^= 1 << random.interval(7),
            _ => damaged.insert(at, 0),
        }
        fs::remove_file(&file).and_then(|()| fs::write(&file, &damaged)).expect("written");
        let (again, notices) = rows();
        assert!(again == whole && matches!(notices[0], CacheNotice::Damaged { .. }), "{notices:?}");
    }
    // These files have the right hash and key, but rows that do not fit the data set.
    let key = cache::key(
        Layout::Packed(Overlong::Cut),
        &Rule { sequence_length: 20, extra: ExtraToken::Included, rest: Remainder::Dropped, seed: 1234, samples: Some(30), documents: 0..40 },
        Indexed::open(&prefix).expect("a data set").lengths(),
    );
    for rows in
        [[vec![77, 0], vec![0, 1], vec![1]], [vec![3, 99], vec![0, 1], vec![1]], [(0..40).flat_map(|d| [d, 0]).collect(), vec![0, 40], vec![1]]]
    {
        cache::write(&file, &key, &rows.map(crate::map::Numbers::Memory)).expect("written");
        let opened = open(&request).expect("opened");
        let error = opened.parts[0].as_ref().expect("samples").sample(0, &mut [0u32; 21], &mut vec![]).expect_err("damaged").to_string();
        assert!(error.contains("the cache is damaged"), "{error}");
    }
}

#[test]
fn masks_that_are_none_are_refused_with_their_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = write(&folder.path().join("x"), &[3, 4, 5]);
    let request = request(&[&prefix], None, "1", [None; 3]);
    let said = |error: Error| error.to_string().replace(&format!("{}/", folder.path().display()), "");
    let refused = || open(&request).err().map(said).unwrap_or_default();
    let mask = |dtype, lengths: &[usize], value: u32| {
        let mut out = Writer::create(&folder.path().join("x.mask"), dtype).expect("a writer");
        lengths.iter().try_for_each(|l| out.document(&vec![value; *l], &[*l])).and_then(|()| out.finish()).expect("written");
    };
    let again = "the mask belongs to other tokens: tokenize again";
    mask(Dtype::U16, &[3, 4, 5], 1);
    assert_eq!(refused(), format!("`x.mask.idx`, byte 17: it has numbers of uint16, and a mask has uint8; {again}"));
    mask(Dtype::U8, &[3, 9], 1);
    assert_eq!(refused(), format!("`x.mask.idx`, byte 18: it has 2 sequences, and `x` 3; {again}"));
    mask(Dtype::U8, &[3, 5, 4], 1);
    assert_eq!(refused(), format!("`x.mask.idx`, byte 38: sequence 1 has 5 numbers, and in `x` it has 4 tokens; {again}"));
    mask(Dtype::U8, &[3, 4, 5], 2);
    let opened = open(&request).expect("numbers are looked at when they are read");
    let set = opened.parts[0].as_ref().expect("samples");
    let (mut tokens, mut pieces) = ([0u32; 21], vec![]);
    let sample = set.sample(0, &mut tokens, &mut pieces).expect("a sample");
    let first = pieces[0].document;
    let error = said(set.counted(&sample, &[2..9, 9..21], &pieces, &mut [0; 21]).expect_err("no mask"));
    let byte = [0, 3, 7][first as usize] + 2;
    assert_eq!(error, format!("`x.mask.bin`, byte {byte}: the mask of token 2 of document {first} is 2; it is 0 or 1"));
    drop(opened);
    fs::remove_file(folder.path().join("x.mask.idx")).expect("removed");
    assert!(refused().contains("`x.mask.bin` is there and `x.mask.idx` is not"));
    fs::remove_file(folder.path().join("x.mask.bin")).expect("removed");
    let missing =
        "`x` has no loss mask: neither `x.mask.bin` nor its .idx is there; tokenizing prompts and answers writes both, or train on all tokens";
    assert_eq!(refused(), missing);
}

#[test]
fn of_damaged_masks_no_number_but_0_and_1_is_taken() {
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = write(&folder.path().join("x"), &lengths(8, 20));
    let request = request(&[&prefix], None, "1", [None; 3]);
    let files = [".mask.bin", ".mask.idx"].map(|end| with(&prefix, end));
    let whole = files.clone().map(|f| fs::read(f).expect("a file"));
    let mut random = RandomState::new(4);
    let (mut taken, mut refused) = (0, 0);
    for case in 0..1000 {
        let mut bytes = whole.clone();
        let own = &mut bytes[case % 2];
        let at = random.interval(own.len() as u32 - 1) as usize;
        match random.interval(4) {
            0 => own.truncate(at),
            1 => own.insert(at, 1),
            _ => own[at] ^= 1 << random.interval(7),
        }
        for (file, bytes) in files.iter().zip(&bytes) {
            fs::remove_file(file).and_then(|()| fs::write(file, bytes)).expect("written");
        }
        let read = open(&request).and_then(|opened| {
            let set = opened.parts[0].as_ref().expect("samples");
            let (mut tokens, mut pieces, mut counted) = ([0u32; 21], vec![], [0; 21]);
            (0..set.len()).try_for_each(|n| {
                let sample = set.sample(n, &mut tokens, &mut pieces)?;
                set.counted(&sample, std::slice::from_ref(&(0..21)), &pieces, &mut counted)?;
                assert!(counted.iter().all(|m| *m < 2));
                Ok(())
            })
        });
        match read {
            Ok(()) => taken += 1,
            Err(_) => refused += 1,
        }
    }
    // A damaged mask that is read has other values of the same lengths, or damage that nobody reads, as in borders of
    // documents.
    assert!(refused > 700 && taken > 0, "{taken} {refused}");
}
