use super::*;
use crate::random::RandomState;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// A data set of a few sequences, with an empty document and documents of two sequences.
fn small(prefix: &Path, dtype: Dtype) {
    let mut writer = Writer::create(prefix, dtype).expect("a writer");
    writer.document(&[1, 2, 3], &[1, 2]).expect("a document");
    writer.document(&[], &[]).expect("a document");
    for n in 0..5 {
        let tokens: Vec<u32> = (0..7 * n % 12).collect();
        writer.document(&tokens, &[tokens.len()]).expect("a document");
    }
    writer.finish().expect("written");
}

/// All documents, each with its sequences.
fn content(set: &Indexed) -> Result<Vec<Vec<Vec<i64>>>, IndexedError> {
    let documents = (0..set.documents()).map(|d| {
        let sequences = set.document(d).expect("a document").map(|s| {
            let mut tokens = vec![0i64; set.length(s).expect("a length") as usize];
            set.read(s, 0, &mut tokens).map(|()| tokens)
        });
        sequences.collect()
    });
    documents.collect()
}

/// The index that the writer makes of what a data set is read as.
fn rewritten(set: &Indexed) -> Vec<u8> {
    let lengths: Vec<i32> = (0..set.sequences()).map(|s| set.length(s).expect("a length") as i32).collect();
    let ends = (0..set.documents()).map(|d| set.document(d).expect("a document").end as i64);
    let borders: Vec<i64> = std::iter::once(0).chain(ends).collect();
    let mut out = vec![];
    write_index(&mut out, set.dtype(), &lengths, &borders).expect("written");
    out
}

#[test]
fn what_is_written_is_read_for_every_type() {
    let folder = tempfile::tempdir().expect("a folder");
    for dtype in Dtype::ALL {
        let prefix = folder.path().join(dtype.name());
        small(&prefix, dtype);
        let set = Indexed::open(&paths(&prefix).1).expect("a data set");
        assert_eq!((set.dtype(), set.documents(), set.sequences()), (dtype, 7, 7));
        let all = content(&set).expect("tokens");
        assert_eq!(all[..2], [vec![vec![1], vec![2, 3]], vec![]]);
        assert_eq!(all[6], [(0..4).collect::<Vec<i64>>()]);
        assert_eq!(rewritten(&set), fs::read(paths(&prefix).1).expect("an index"));
        let mut joined = Writer::create(&folder.path().join("joined"), dtype).expect("a writer");
        joined.append(&set).and_then(|()| joined.append(&set)).and_then(|()| joined.finish()).expect("written");
        assert_eq!(content(&Indexed::open(&folder.path().join("joined")).expect("a data set")).expect("tokens"), [&all[..], &all[..]].concat());
    }
}

#[test]
fn a_writer_goes_on_where_an_earlier_one_was_settled() {
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("x");
    let mut writer = Writer::create(&prefix, Dtype::U16).expect("a writer");
    writer.document(&[1, 2, 3], &[3]).and_then(|()| writer.settle()).expect("settled");
    writer.document(&[4, 5], &[2]).and_then(|()| writer.settle()).expect("settled");
    drop(writer);
    let mut writer = Writer::resume(&prefix, Dtype::U16, vec![3], vec![0, 1]).expect("a writer");
    writer.document(&[6], &[1]).and_then(|()| writer.finish()).expect("written");
    assert_eq!(content(&Indexed::open(&prefix).expect("a data set")).expect("tokens"), [[[1, 2, 3].to_vec()], [[6].to_vec()]]);
    let short = Writer::resume(&prefix, Dtype::U16, vec![3], vec![0, 1]);
    assert!(matches!(short, Err(IndexedError::Io { .. })), "its file is not there");
}

/// What is wrong with a data set after a change of its index.
fn said(change: impl FnOnce(&mut Vec<u8>)) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("x");
    small(&prefix, Dtype::U16);
    let idx = paths(&prefix).1;
    let mut bytes = fs::read(&idx).expect("an index");
    change(&mut bytes);
    fs::write(&idx, bytes).expect("written");
    let error = Indexed::open(&prefix).err().expect("refused").to_string();
    error.replace(&format!("{}/", folder.path().display()), "")
}

#[test]
fn damage_is_named_with_its_place() {
    let again = "the file is damaged or belongs to another `.bin`: copy both again, or tokenize again";
    assert_eq!(said(|b| b[3] = b'x'), "`x.idx`, byte 0: it does not begin as the index of an indexed data set does, with MMIDIDX");
    assert_eq!(said(|b| b[9] = 2), "`x.idx`, byte 9: it is of version 2, and only version 1 is known");
    assert_eq!(
        said(|b| b[17] = 7),
        "`x.idx`, byte 17: the code 7 of the type of tokens is that of floats, which are no tokens; known are 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16"
    );
    assert_eq!(said(|b| b.truncate(20)), format!("`x.idx`, byte 20: it ends within its header of 34 bytes; {again}"));
    assert_eq!(said(|b| b.truncate(100)), format!("`x.idx`, byte 100: 7 sequences and 8 borders make 182 bytes; it has 100 and ends here; {again}"));
    assert_eq!(
        said(|b| b.extend([0; 7])),
        "`x.idx`, byte 182: it has modes of sequences, so it is of a multimodal data set, which mcc does not read"
    );
    assert_eq!(
        said(|b| b[26..34].fill(0xff)).split(';').next(),
        Some("`x.idx`, byte 182: 7 sequences and 18446744073709551615 borders make 147573952589676413038 bytes")
    );
    assert_eq!(
        said(|b| b[34] = 2),
        format!("`x.idx`, byte 62: sequence 0 begins at byte 0, has 2 tokens of 2 bytes, and the next begins at byte 2; {again}")
    );
    assert_eq!(said(|b| b[41] = 0x80), format!("`x.idx`, byte 38: sequence 1 has a length of -2147483646; {again}"));
    assert_eq!(said(|b| b[118] = 1), format!("`x.idx`, byte 118: the first document begins with sequence 1, and not with 0; {again}"));
    assert_eq!(said(|b| b[126] = 3), format!("`x.idx`, byte 126: document 1 begins with sequence 3, and the next with 2; {again}"));
    assert_eq!(said(|b| b[174] = 6), format!("`x.idx`, byte 174: documents end at sequence 6, of 7; {again}"));
}

#[test]
fn a_data_set_is_two_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("x");
    let error = |e: Result<Indexed, IndexedError>| e.err().expect("refused").to_string().replace(&format!("{}/", folder.path().display()), "");
    assert_eq!(error(Indexed::open(&prefix)), "there is no data set `x`: neither `x.bin` nor `x.idx` is there");
    small(&prefix, Dtype::U8);
    fs::remove_file(paths(&prefix).1).expect("removed");
    assert_eq!(
        error(Indexed::open(&prefix)),
        "`x.bin` is there and `x.idx` is not; a data set is both files: copy the other one too, or tokenize again"
    );
}

#[test]
fn tokens_that_nobody_takes_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("x");
    small(&prefix, Dtype::I16);
    let bin = paths(&prefix).0;
    let mut bytes = fs::read(&bin).expect("tokens");
    bytes[5] = 0x80;
    fs::write(&bin, bytes).expect("written");
    let set = Indexed::open(&prefix).expect("a data set");
    let error = set.read(1, 0, &mut [0i32; 2]).expect_err("refused").to_string();
    assert_eq!(error, format!("`{}`: token 1 of sequence 1 is -32765; taken is 0 or more", bin.display()));
    let beyond = set.read(1, 1, &mut [0i32; 2]).expect_err("refused").to_string();
    assert_eq!(beyond, format!("`{}`: tokens 1 to 3 of sequence 1 are asked for, which has 2", bin.display()));
    let mut writer = Writer::create(&folder.path().join("y"), Dtype::I8).expect("a writer");
    assert!(matches!(writer.sequence(&[128]), Err(IndexedError::Wide { value: 128, .. })));
}

/// Damages bytes in one of the ways in which files are.
fn damage(bytes: &mut Vec<u8>, random: &mut RandomState) {
    let mut at = |bytes: &[u8]| random.interval(bytes.len().max(1) as u32 - 1) as usize;
    match at(&[0; 7]) {
        0 => bytes.truncate(at(bytes)),
        1 => bytes.extend(vec![0; 1 + at(&[0; 16])]),
        2 if !bytes.is_empty() => {
            let (from, to) = (at(bytes), at(bytes));
            bytes.drain(from.min(to)..from.max(to));
        }
        3 if bytes.len() > 8 => {
            let from = at(&bytes[8..]);
            let fill = [0, 1, 0x7f, 0x80, 0xff][at(&[0; 5])];
            bytes[from..from + 8].fill(fill);
        }
        4 if bytes.len() > 16 => {
            let (from, to) = (at(&bytes[8..]), at(&bytes[8..]));
            bytes.copy_within(from..from + 8, to);
        }
        _ if !bytes.is_empty() => {
            for _ in 0..=at(&[0; 3]) {
                let at_byte = at(bytes);
                bytes[at_byte] ^= 1 << at(&[0; 8]);
            }
        }
        _ => {}
    }
}

#[test]
fn of_ten_thousand_damaged_data_sets_none_is_taken_for_what_it_is_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("x");
    let (bin, idx) = paths(&prefix);
    let wholes = Dtype::ALL.map(|dtype| {
        small(&prefix, dtype);
        [&bin, &idx].map(|f| fs::read(f).expect("a file"))
    });
    let mut random = RandomState::new(5);
    let (mut taken, mut refused) = (0, 0);
    for case in 0..10_000 {
        let whole = &wholes[case % 6];
        let mut files = whole.clone();
        damage(&mut files[usize::from(case % 5 != 0)], &mut random);
        // The files are removed first, as the file system would put overwritten bytes on the disk at once.
        for (path, bytes) in [&bin, &idx].into_iter().zip(&files) {
            fs::remove_file(path).and_then(|()| fs::write(path, bytes)).expect("written");
        }
        let opened = catch_unwind(AssertUnwindSafe(|| Indexed::open(&prefix).and_then(|set| Ok((content(&set)?, rewritten(&set))))));
        match opened.expect("no panic") {
            Err(_) => refused += 1,
            // A damaged data set that opens is just what the writer would write for it: it is unchanged, or has other
            // tokens of the same lengths, or has a type or documents that another writer could have written.
            Ok((tokens, index)) => {
                taken += 1;
                assert_eq!(index, fs::read(&idx).expect("an index"), "{case}");
                let count: usize = tokens.iter().flatten().map(Vec::len).sum();
                let stored = fs::metadata(&bin).expect("a file").len() as usize;
                assert_eq!(stored % count.max(1), 0, "{case}");
                assert!(whole[0].len() == stored, "{case}: tokens are missing");
            }
        }
    }
    assert!(taken > 500 && refused > 7000, "{taken} {refused}");
}
