use super::super::documents::{Documents, Fields, Position};
use super::super::tests::{done, files, fixture, request};
use super::super::{Existing, TextError, TokenizeRequest, Tokenizer};
use super::*;
use crate::random::RandomState;
use parquet::data_type::{DataType, Int64Type};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::fs;

#[path = "../../../../passes/tests/forged/memory.rs"]
mod memory;

/// What `make_parquet.py` wrote: columns of texts, and of lists.
const TEXTS: [&str; 6] = ["brotli", "gzip", "lz4", "none", "snappy", "zstd"];
const LISTS: [&str; 2] = ["large_list", "list"];

fn written(name: &str) -> PathBuf {
    fixture(&format!("parquet/{name}.parquet"))
}

#[test]
fn tokens_of_parquet_are_byte_for_byte_those_of_json_lines() {
    let folder = tempfile::tempdir().expect("a folder");
    let tokenizer = Tokenizer::open(&fixture("tokenizer.json")).expect("a tokenizer");
    let made = |input: PathBuf, name: &str| {
        let prefix = folder.path().join(name);
        done(&TokenizeRequest { existing: Existing::Replaced, end: tokenizer.end(None).ok(), ..request(&tokenizer, vec![input], &prefix) });
        files(&prefix)
    };
    for name in LISTS {
        assert!(made(written(name), name) == files(&fixture("eod")), "{name}: not Megatron's");
    }
    let lines = fs::read_to_string(fixture("docs.jsonl")).expect("text");
    let single: Vec<&str> = lines.split('\n').filter(|l| !l.contains("\"text\": [")).collect();
    let jsonl = folder.path().join("single.jsonl");
    fs::write(&jsonl, single.join("\n")).expect("written");
    let expected = made(jsonl, "single");
    for name in TEXTS {
        assert!(made(written(name), name) == expected, "{name}");
    }
}

/// The texts of a file from a position on, and where each row ends.
fn rows(file: &Path, at: Position) -> Result<Vec<(Vec<String>, Position)>, TextError> {
    let fields = Fields::of_texts("text");
    let mut documents = Documents::new(&[file.into()], &fields, at)?;
    let mut found = vec![];
    while let Some(batch) = documents.batch(1)? {
        let end = batch.end;
        batch.texts(&fields, |document| {
            found.push((document.texts.iter().map(ToString::to_string).collect(), end));
            Ok(())
        })?;
    }
    Ok(found)
}

#[test]
fn reading_goes_on_after_any_row() {
    for name in ["list", "snappy", "lz4"] {
        let all = rows(&written(name), Position::default()).expect("rows");
        assert!(all.last().is_some_and(|(_, at)| at.group >= 2 && at.row > 1), "{name}: several row groups");
        for (n, (_, at)) in all.iter().enumerate() {
            assert!(rows(&written(name), *at).expect("rows") == all[n + 1..], "{name} after row {n}");
        }
    }
}

/// A file with a column of one row group, which `values` and levels of definition and repetition are.
fn file<T: DataType>(folder: &Path, schema: &str, values: &[T::T], levels: &[[i16; 2]]) -> PathBuf {
    let path = folder.join("x.parquet");
    let schema = Arc::new(parse_message_type(schema).expect("a schema"));
    let mut writer = SerializedFileWriter::new(File::create(&path).expect("a file"), schema, Arc::default()).expect("a writer");
    let mut group = writer.next_row_group().expect("a row group");
    while let Some(mut column) = group.next_column().expect("a column") {
        let [definitions, repetitions] = [0, 1].map(|k| levels.iter().map(|l| l[k]).collect::<Vec<_>>());
        let of = |levels| Some(levels).filter(|l: &&[i16]| !l.is_empty());
        column.typed::<T>().write_batch(values, of(&definitions), of(&repetitions)).expect("written");
        column.close().expect("closed");
    }
    group.close().expect("closed");
    writer.close().expect("closed");
    path
}

#[test]
fn rows_that_cannot_be_read_are_named_with_their_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let said = |path: PathBuf| {
        let error = rows(&path, Position::default()).map(|all| all.len()).expect_err("refused");
        error.to_string().replace(&format!("{}/", folder.path().display()), "")
    };
    let texts: Vec<ByteArray> = ["a", "b"].map(ByteArray::from).to_vec();
    let text = |schema, values: &[ByteArray], levels: &[[i16; 2]]| file::<ByteArrayType>(folder.path(), schema, values, levels);
    let optional = "message m { optional binary text (STRING); }";
    assert_eq!(
        said(text(optional, &texts, &[[1, 0], [1, 0], [0, 0]])),
        "`x.parquet`, row 2 of row group 0, both counted from 0: it is null, and no text"
    );
    assert_eq!(
        said(text("message m { required binary text; }", &[ByteArray::from(b"a\xff".to_vec())], &[])),
        "`x.parquet`, row 0 of row group 0, both counted from 0: byte 1 of its text is not UTF-8"
    );
    let list = "message m { optional group text (LIST) { repeated group list { optional binary element (STRING); } } }";
    assert_eq!(rows(&text(list, &texts, &[[3, 0], [3, 1], [1, 0]]), Position::default()).expect("rows").len(), 2);
    let row = "`x.parquet`, row 1 of row group 0, both counted from 0:";
    assert_eq!(said(text(list, &texts, &[[3, 0], [3, 0], [2, 1]])), format!("{row} its list has a null, and no text"));
    assert_eq!(said(text(list, &texts[..1], &[[3, 0], [0, 0]])), format!("{row} it is null, and no list of texts"));
    assert_eq!(
        said(text("message m { required binary body; required binary id; }", &texts, &[])),
        "`x.parquet`: it has no column `text`: name the one that has the text, of `body`, `id`"
    );
    let read = "what is read is a text (string or binary), or a list of texts";
    assert_eq!(
        said(file::<Int64Type>(folder.path(), "message m { required int64 text; }", &[1], &[])),
        format!("`x.parquet`: its column `text` has values of the type INT64; {read}")
    );
    let structure = "message m { required group text { required binary a; required binary b; } }";
    assert_eq!(said(text(structure, &texts, &[])), format!("`x.parquet`: its column `text` has structures; {read}"));
    let nested = "message m { repeated group text { repeated binary a; } }";
    assert_eq!(said(text(nested, &texts, &[[2, 0], [2, 2]])), format!("`x.parquet`: its column `text` has structures; {read}"));
    let path = folder.path().join("x.parquet");
    for (bytes, what) in [
        (&b"PAR1"[..], "it is no Parquet file: it is too short"),
        (b"", "it is no Parquet file: it is too short"),
        (b"PAR1 and more", "it is no Parquet file, or not all of one: it does not end as those do"),
        (b"\xff\xff\0\0PAR1", "its footer is damaged: it is longer than the file"),
        (b"\xff\0\0\0\0PAR1", "its footer is damaged"),
        (b"\0\0\0\0PARE", "its footer is encrypted, which is not read"),
    ] {
        fs::write(&path, bytes).expect("written");
        assert_eq!(said(path.clone()), format!("`x.parquet`: {what}"));
    }
}

#[test]
fn prompts_are_read_beside_their_answers_row_by_row() {
    let folder = tempfile::tempdir().expect("a folder");
    let texts: Vec<ByteArray> = ["one", "two", "three"].map(ByteArray::from).to_vec();
    let path = file::<ByteArrayType>(folder.path(), "message m { required binary prompt; required binary completion; }", &texts, &[]);
    let read = |prompt: &str, at| {
        let fields = Fields { text: "completion".into(), prompt: Some(prompt.into()), chat: None };
        let mut documents = Documents::new(std::slice::from_ref(&path), &fields, at)?;
        let mut found = vec![];
        while let Some(batch) = documents.batch(1)? {
            let end = batch.end;
            batch.texts(&fields, |document| {
                found.push((format!("{:?} {:?}", document.texts, document.learnt.map(|all| all[0].start)), end));
                Ok(())
            })?;
        }
        Ok::<_, TextError>(found)
    };
    let all = read("prompt", Position::default()).expect("rows");
    let shown: Vec<&str> = all.iter().map(|(text, _)| text.as_str()).collect();
    assert_eq!(shown, ["[\"oneone\"] Some(3)", "[\"twotwo\"] Some(3)", "[\"threethree\"] Some(5)"]);
    assert!(read("prompt", all[0].1).expect("rows") == all[1..]);
    let text = read("question", Position::default()).expect_err("no such column").to_string();
    assert!(text.ends_with("it has no column `question`: name the one that has the text, of `prompt`, `completion`"), "{text}");
}

/// What reading takes beside what is in proportion to a file: a decompressor and its tables.
const BESIDE: usize = 128 << 10;

/// Memory for each byte of a file. None of these is compressed to less than a tenth.
const TIMES: usize = 32;

#[test]
fn ten_thousand_damaged_files_end_nobody_and_take_memory_in_proportion() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("x.parquet");
    let (mut random, mut whole) = (RandomState::new(7), 0);
    // Panics of the `parquet` crate are caught. This hook keeps them from being printed, which would take memory and
    // time.
    let (own, hook) = (std::thread::current().id(), std::panic::take_hook());
    std::panic::set_hook(Box::new(move |panic| {
        if std::thread::current().id() != own {
            hook(panic);
        }
    }));
    for name in TEXTS.into_iter().chain(LISTS) {
        let bytes = fs::read(written(name)).expect("a file");
        for n in 0..1250 {
            let mut bytes = bytes.clone();
            // Every second file is damaged in its footer alone, the others anywhere.
            let begin =
                if n % 2 == 0 { 0 } else { bytes.len() - 8 - u32::from_le_bytes(*bytes[..bytes.len() - 4].last_chunk().expect("a length")) as usize };
            for _ in 0..=random.interval(3) {
                let at = begin + random.interval((bytes.len() - begin - 1) as u32) as usize;
                match random.interval(4) {
                    0 => bytes[at] ^= 1 << random.interval(7),
                    1 => bytes[at] = 0xff,
                    2 => bytes.insert(at, random.interval(255) as u8),
                    3 => drop(bytes.remove(at)),
                    _ => bytes.extend_from_within(at..),
                }
            }
            let _ = fs::remove_file(&path);
            fs::write(&path, &bytes).expect("written");
            let (read, took) = memory::most(|| rows(&path, Position::default()));
            whole += usize::from(read.is_ok());
            assert!(took <= BESIDE + TIMES * bytes.len(), "{name}: {took} bytes for a file of {}", bytes.len());
        }
    }
    assert!(whole < 2500, "{whole} are read all the same");
}
