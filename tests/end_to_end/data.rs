//! `mcc data`.

use crate::mcc::Dir;
use expect_test::expect;

#[test]
fn text_becomes_a_data_set_that_is_shown_as_text() {
    let dir = Dir::new();
    dir.write("a.jsonl", "{\"text\": \"The quick brown fox.\"}\n{\"text\": \"\"}\n");
    let trained = dir.line("data train-tokenizer a.jsonl --tokens 257 -o tokenizer").succeeds().stdout;
    assert_eq!(trained, "tokenizer/tokenizer.json: 257 tokens\n");
    let tokenize = "data tokenize a.jsonl --tokenizer tokenizer --append-eod -o a";
    let made = dir.line(tokenize).succeeds().stdout;
    assert_eq!(made, "a.bin, a.idx: 2 documents, 21 tokens of uint16\n");
    dir.line(tokenize).misuses_with(&["`a.bin` is there already", "--force"]);
    dir.line(&format!("{tokenize} --force")).succeeds();
    let shown = dir.line("data inspect a --tokenizer tokenizer").succeeds().stdout;
    expect![[r#"
        documents     2, 1 of them empty
        tokens        21 of uint16, 42 B
        lengths       0 to 21 tokens, half of them up to 0
        largest token 221
        document 0    "The quick brown fox.<|endoftext|>"
    "#]]
    .assert_eq(&shown);
    assert_eq!(dir.entries(), ["a.bin", "a.idx", "a.jsonl", "tokenizer"]);
}

#[test]
fn what_is_no_data_set_and_no_text_is_refused() {
    let dir = Dir::new();
    dir.write("a.csv", "1,2\n");
    dir.write("a.txt", "Some text");
    dir.write("b.bin", "tokens");
    dir.line("data train-tokenizer a.csv -o tokenizer").fails_with(&["`.csv` is no text that is known", ".jsonl"]);
    dir.line("data train-tokenizer a.txt --tokens 100 -o tokenizer").fails_with(&["257 or more"]);
    dir.line("data tokenize a.txt --tokenizer a.txt -o a").fails_with(&["no tokenizer that can be read"]);
    dir.line("data inspect a").fails_with(&["there is no data set `a`"]);
    dir.line("data inspect b").fails_with(&["`b.bin` is there and `b.idx` is not"]);
    assert_eq!(dir.entries(), ["a.csv", "a.txt", "b.bin"]);
}
