use super::*;
use crate::indexed::{Dtype, Indexed, Writer, paths};
use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

pub(super) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text").join(name)
}

pub(super) fn request<'a>(tokenizer: &'a Tokenizer, inputs: Vec<PathBuf>, prefix: &Path) -> TokenizeRequest<'a> {
    TokenizeRequest {
        inputs,
        tokenizer,
        fields: Fields::of_texts("text"),
        end: None,
        special: Special::LeftOut,
        dtype: None,
        prefix: prefix.into(),
        existing: Existing::Refused,
        begin: Begin::Resume,
    }
}

pub(super) fn done(request: &TokenizeRequest) -> Summary {
    match tokenize(request, |_| ControlFlow::Continue(())).expect("tokens") {
        Outcome::Done(summary) => summary,
        Outcome::Stopped(_) => panic!("nobody stopped it"),
    }
}

pub(super) fn files(prefix: &Path) -> [Vec<u8>; 2] {
    let (bin, idx) = paths(prefix);
    [bin, idx].map(|f| fs::read(f).expect("a file"))
}

#[test]
fn tokens_are_byte_for_byte_those_of_megatron() {
    let folder = tempfile::tempdir().expect("a folder");
    let tokenizer = Tokenizer::open(&fixture("tokenizer.json")).expect("a tokenizer");
    let text = fs::read(fixture("docs.jsonl")).expect("text");
    let gz = folder.path().join("docs.jsonl.gz");
    let mut out = flate2::write::GzEncoder::new(fs::File::create(&gz).expect("a file"), flate2::Compression::fast());
    out.write_all(&text).and_then(|()| out.finish()).expect("written");
    let zst = folder.path().join("docs.json.zst");
    fs::write(&zst, zstd::encode_all(&text[..], 1).expect("compressed")).expect("written");
    for (name, end) in [("plain", None), ("eod", Some(tokenizer.end(None).expect("a token")))] {
        for input in [fixture("docs.jsonl"), gz.clone(), zst.clone()] {
            let prefix = folder.path().join(name);
            let summary = done(&TokenizeRequest { end, existing: Existing::Replaced, ..request(&tokenizer, vec![input], &prefix) });
            assert!(files(&prefix) == files(&fixture(name)), "{name}");
            let set = Indexed::open(&prefix).expect("a data set");
            assert_eq!((summary.documents, summary.sequences, summary.tokens), (set.documents(), set.sequences(), set.tokens()));
            assert_eq!(summary.dtype, Dtype::U16);
        }
    }
    let left: Vec<_> = fs::read_dir(folder.path()).expect("a folder").map(|e| e.expect("a file").file_name()).collect();
    assert_eq!(left.len(), 6, "nothing is left beside: {left:?}");
}

#[test]
fn a_job_goes_on_where_it_was_stopped() {
    let folder = tempfile::tempdir().expect("a folder");
    let tokenizer = Tokenizer::open(&fixture("")).expect("a tokenizer");
    // Each file is at least one batch, and a round has 64 batches.
    let inputs: Vec<PathBuf> = (0..200)
        .map(|n| {
            let file = folder.path().join(format!("{n}.txt"));
            fs::write(&file, format!("Document number {n}, with words.")).expect("written");
            file
        })
        .collect();
    let inputs = [inputs, vec![fixture("docs.jsonl")]].concat();
    let (whole, halves) = (folder.path().join("whole"), folder.path().join("halves"));
    done(&request(&tokenizer, inputs.clone(), &whole));
    let halved = request(&tokenizer, inputs.clone(), &halves);
    for rounds in [1, 2] {
        let outcome = tokenize(&halved, |p| {
            assert!(p.bytes <= p.of);
            ControlFlow::Break(())
        });
        let Ok(Outcome::Stopped(progress)) = outcome else { panic!("{outcome:?}") };
        assert_eq!(progress.documents, 64 * rounds);
        // Bytes that were only read ahead do not count.
        let made = inputs[..64 * rounds as usize].iter().map(|f| fs::metadata(f).expect("a file").len());
        assert_eq!(progress.bytes, made.sum::<u64>());
    }
    let other = tokenize(&TokenizeRequest { end: Some(0), ..request(&tokenizer, inputs, &halves) }, |_| ControlFlow::Continue(()));
    let text = other.expect_err("another job").to_string();
    let says = "is of another job, which is not finished and has no token at the end of documents";
    assert!(text.ends_with(says), "{text}");
    // Bytes behind the last recorded state are dropped and written again.
    let part = crate::indexed::with(&halves, ".bin.part");
    fs::File::options().append(true).open(&part).and_then(|mut f| f.write_all(b"more")).expect("written");
    assert_eq!(done(&halved).resumed, 128);
    assert!(files(&halves) == files(&whole));
}

/// What is wrong with a text.
fn said(name: &str, text: &[u8]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join(name);
    fs::write(&file, text).expect("written");
    let tokenizer = Tokenizer::open(&fixture("tokenizer.json")).expect("a tokenizer");
    let error = tokenize(&request(&tokenizer, vec![file], &folder.path().join("x")), |_| ControlFlow::Continue(()));
    error.expect_err("refused").to_string().replace(&format!("{}/", folder.path().display()), "")
}

#[test]
fn text_that_cannot_be_read_is_named_with_its_place() {
    let kinds = "read are JSON lines (.jsonl, .json, .ndjson) and plain text (.txt), also with .gz or .zst, and .parquet";
    assert_eq!(said("x.csv", b""), format!("`x.csv`: `.csv` is no text that is known; {kinds}"));
    assert_eq!(
        said("x.parquet.gz", b""),
        format!("`x.parquet.gz`: decompress it first: a Parquet file is not read from its begin to its end; {kinds}")
    );
    let object = "each line is a JSON object whose field `text` is a text";
    assert_eq!(
        said("x.jsonl", b"{\"text\": \"a\"}\n\n{\"text\": 1}"),
        format!("`x.jsonl`, line 3, column 10: invalid type: integer `1`, expected a text or a list of texts: {object}")
    );
    assert_eq!(said("x.jsonl", b"{\"text\": \"a\"}}\n"), format!("`x.jsonl`, line 1, column 14: trailing characters: {object}"));
    assert_eq!(said("x.jsonl", b"{\"body\": \"a\"}\n"), "`x.jsonl`, line 1: it has no field `text`: name the field that has the text");
    assert_eq!(
        said("x.jsonl", b"{\"text\": \"\xff\"}\n"),
        "`x.jsonl`, line 1, column 11: it is not UTF-8 from here on: convert the file, for example with iconv"
    );
    assert_eq!(said("x.txt", b"a\nb\xff"), "`x.txt`, line 2: byte 3 of the file is not UTF-8: convert it, for example with iconv");
    assert!(said("x.jsonl.gz", &[0x1f, 0x8b, 8, 0, 1]).starts_with("`x.jsonl.gz`: "));
}

#[test]
fn a_data_set_that_is_there_is_not_replaced_unasked() {
    let folder = tempfile::tempdir().expect("a folder");
    let prefix = folder.path().join("x");
    Writer::create(&prefix, Dtype::U16).and_then(Writer::finish).expect("written");
    let tokenizer = Tokenizer::open(&fixture("tokenizer.json")).expect("a tokenizer");
    let error = tokenize(&request(&tokenizer, vec![fixture("docs.jsonl")], &prefix), |_| ControlFlow::Continue(()));
    let text = error.expect_err("refused").to_string();
    assert!(text.ends_with("x.bin` is there already; name another prefix, or ask for it to be replaced"), "{text}");
}

#[test]
fn tokenizers_that_are_none_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("tokenizer.json");
    for text in ["", "{}", "[1]", "{\"model\": {\"type\": \"BPE\", \"vocab\": {}, \"merges\": [\"a b\"]}}"] {
        fs::write(&file, text).expect("written");
        assert!(matches!(Tokenizer::open(&file), Err(TextError::Tokenizer { .. })), "{text}");
    }
    // Damaged files are refused or are still tokenizers, but never panic.
    let whole = fs::read(fixture("tokenizer.json")).expect("a tokenizer");
    let mut random = crate::random::RandomState::new(3);
    for _ in 0..60 {
        let mut bytes = whole.clone();
        let at = random.interval(bytes.len() as u32 - 1) as usize;
        bytes[at] = b"{}[],:\"09ax"[random.interval(10) as usize];
        fs::write(&file, bytes).expect("written");
        if let Ok(tokenizer) = Tokenizer::open(&file) {
            let tokens = tokenizer.encode("Some text, and more.", Special::LeftOut).unwrap_or_default();
            let _ = tokenizer.decode(&tokens);
        }
    }
}

#[test]
fn a_new_tokenizer_gives_back_its_text_and_is_the_same_each_time() {
    let folder = tempfile::tempdir().expect("a folder");
    let recipe = Recipe { inputs: vec![fixture("docs.jsonl")], field: "text".into(), tokens: 400, special: vec!["<|endoftext|>".into()] };
    let file = folder.path().join("tokenizer.json");
    let tokenizer = train(&recipe, &file).expect("a tokenizer");
    let first = fs::read(&file).expect("a file");
    assert_eq!(tokenizer.tokens(), 400);
    assert_eq!(tokenizer.end(None).expect("a token"), 0);
    for text in ["The loss falls.", "日本語 👩‍👩‍👧‍👦\r\n\t x"] {
        let tokens = tokenizer.encode(text, Special::LeftOut).expect("tokens");
        assert_eq!(tokenizer.decode(&tokens).expect("a text"), text);
    }
    train(&recipe, &file).expect("a tokenizer");
    assert!(fs::read(&file).expect("a file") == first);
    let small = train(&Recipe { tokens: 256, ..recipe }, &file).err().map(|e| e.to_string());
    assert_eq!(small.as_deref(), Some("a tokenizer of 256 tokens; one of bytes has 256 and a token for each special one, so 257 or more"));
}

/// Lines of prompts and answers, and what is asked of them.
fn answers<'a>(tokenizer: &'a Tokenizer, folder: &Path, lines: &str) -> TokenizeRequest<'a> {
    let file = folder.join("answers.jsonl");
    fs::write(&file, lines).expect("written");
    let fields = Fields { text: "completion".into(), prompt: Some("prompt".into()), chat: None };
    TokenizeRequest { fields, end: tokenizer.end(None).ok(), ..request(tokenizer, vec![file], &folder.join("x")) }
}

/// The numbers of each sequence.
fn sequences(prefix: &Path) -> Vec<Vec<u32>> {
    let set = Indexed::open(prefix).expect("a data set");
    let sequence = |n| {
        let mut out = vec![0; set.length(n).expect("a length") as usize];
        set.read(n, 0, &mut out).map(|()| out).expect("numbers")
    };
    (0..set.sequences()).map(sequence).collect()
}

#[test]
fn a_mask_counts_the_tokens_of_answers() {
    let folder = tempfile::tempdir().expect("a folder");
    let tokenizer = Tokenizer::open(&fixture("tokenizer.json")).expect("a tokenizer");
    let pairs = [("What is it? ", "A test."), ("", "Only an answer"), ("Only a prompt", ""), ("Wor", "ds in a token"), ("日本", "語"), ("", "")];
    let line = |(prompt, completion): &(&str, &str)| serde_json::json!({"prompt": prompt, "completion": completion, "text": "x"}).to_string() + "\n";
    let asked = answers(&tokenizer, folder.path(), &pairs.iter().map(line).collect::<String>());
    let summary = done(&asked);
    let prefix = folder.path().join("x");
    let (tokens, mask) = (sequences(&prefix), sequences(&crate::mask::prefix(&prefix)));
    assert_eq!(summary.counted, Some(mask.iter().flatten().map(|m| u64::from(*m)).sum()));
    // The pair of two empty texts has no tokens.
    assert_eq!((tokens.len(), mask.len(), summary.documents), (5, 5, 6));
    for (((prompt, answer), tokens), mask) in pairs.iter().zip(&tokens).zip(&mask) {
        let mut whole = tokenizer.encode(&format!("{prompt}{answer}"), Special::LeftOut).expect("tokens");
        whole.extend(tokenizer.end(None).ok());
        assert_eq!((tokens, mask.len()), (&whole, tokens.len()));
        // The mask is zeros and then ones, of which the last is the end token's.
        assert!(mask.is_sorted() && mask.last() == Some(&1));
        let of_prompt = mask.iter().filter(|m| **m == 0).count();
        let bytes = |tokens: &[u32]| tokenizer.decode(tokens).expect("a text").len();
        assert!(bytes(&tokens[..of_prompt]) <= prompt.len() && bytes(&tokens[..=of_prompt]) > prompt.len(), "{prompt} {answer}");
    }
    assert!(mask[0].contains(&0) && !mask[1].contains(&0));
    crate::mask::Mask::open(&Indexed::open(&prefix).expect("a data set")).expect("it fits");
}

#[test]
fn a_job_with_a_mask_goes_on_where_it_was_stopped() {
    let folder = tempfile::tempdir().expect("a folder");
    let tokenizer = Tokenizer::open(&fixture("tokenizer.json")).expect("a tokenizer");
    let asked = answers(&tokenizer, folder.path(), "{\"prompt\": \"a b\", \"completion\": \" c d\"}\n");
    let inputs = vec![asked.inputs[0].clone(); 150];
    let whole = TokenizeRequest { inputs: inputs.clone(), prefix: folder.path().join("whole"), fields: asked.fields.clone(), ..asked };
    let counted = done(&whole).counted;
    let halves = TokenizeRequest { prefix: folder.path().join("halves"), fields: whole.fields.clone(), inputs, ..whole };
    for _ in 0..2 {
        let outcome = tokenize(&halves, |_| ControlFlow::Break(()));
        assert!(matches!(outcome, Ok(Outcome::Stopped(_))), "{outcome:?}");
    }
    let summary = done(&halves);
    assert_eq!((summary.resumed, summary.counted), (128, counted));
    for end in ["", ".mask"] {
        let at = |name: &str| folder.path().join(format!("{name}{end}"));
        assert!(files(&at("halves")) == files(&at("whole")), "{end}");
    }
    // A mask without its data set is not replaced either.
    fs::remove_file(paths(&folder.path().join("halves")).0).and_then(|()| fs::remove_file(paths(&folder.path().join("halves")).1)).expect("removed");
    let text = tokenize(&halves, |_| ControlFlow::Continue(())).expect_err("refused").to_string();
    assert!(text.contains("halves.mask.bin` is there already"), "{text}");
}

#[test]
fn prompts_and_answers_that_are_none_are_named_with_their_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let tokenizer = Tokenizer::open(&fixture("tokenizer.json")).expect("a tokenizer");
    let said = |lines: &str| {
        let error = tokenize(&answers(&tokenizer, folder.path(), lines), |_| ControlFlow::Continue(())).expect_err("refused");
        error.to_string().replace(&format!("{}/", folder.path().display()), "")
    };
    assert_eq!(said("{\"completion\": \"a\"}"), "`answers.jsonl`, line 1: it has no field `prompt`: name the field that has the text");
    assert_eq!(
        said("\n{\"prompt\": \"a\", \"completion\": [\"b\", \"c\"]}"),
        "`answers.jsonl`, line 2: `completion` has a list of 2 texts, and beside a prompt it is one: join them"
    );
    let chat = said("{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}], \"completion\": \"b\"}");
    assert!(chat.contains("column 12: invalid type: map") && chat.ends_with("whose fields `completion` and `prompt` are texts"), "{chat}");
    let plain = TokenizeRequest { inputs: vec!["a.txt".into()], ..answers(&tokenizer, folder.path(), "") };
    let text = tokenize(&plain, |_| ControlFlow::Continue(())).expect_err("refused").to_string();
    assert_eq!(text, "`a.txt`: a plain text has no prompts; those are fields of JSON lines or columns of Parquet");
}
