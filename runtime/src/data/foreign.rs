//! Files that are often at hand and hold no tokens as they are: what each is, and what to do instead.

use serde::de::IgnoredAny;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// First bytes, and what such a file is.
const KNOWN: [(&[u8], &str); 21] = [
    (b"\x1f\x8b", "it is compressed with gzip: unpack it (`gunzip`)"),
    (b"\x28\xb5\x2f\xfd", "it is compressed with zstd: unpack it (`unzstd`)"),
    (b"\xfd7zXZ\0", "it is compressed with xz: unpack it (`unxz`)"),
    (b"BZh", "it is compressed with bzip2: unpack it (`bunzip2`)"),
    (b"\x04\x22\x4d\x18", "it is compressed with lz4: unpack it (`unlz4`)"),
    (b"7z\xbc\xaf\x27\x1c", "it is a 7z archive: unpack it (`7z x`)"),
    (b"PAR1", "it is Parquet: `open(\"data.txt\", \"w\").write(\"\\n\".join(pandas.read_parquet(FILE)[\"text\"]))` writes its column `text`"),
    (b"ARROW1", "it is Arrow: `open(\"data.txt\", \"w\").write(\"\\n\".join(pandas.read_feather(FILE)[\"text\"]))` writes its column `text`"),
    (
        b"\xff\xff\xff\xff",
        "it is an Arrow stream, as Hugging Face's data sets have: with `t = pyarrow.ipc.open_stream(FILE).read_all()`, `open(\"data.txt\", \
         \"w\").write(\"\\n\".join(t[\"text\"].to_pylist()))` writes its column `text`, and `numpy.concatenate(t[\"input_ids\"].to_pylist())\
         .astype(\"int32\").tofile(\"tokens.bin\")` its tokens, for --data-dtype int32",
    ),
    (b"\x89HDF", "it is HDF5: `h5py.File(FILE)[NAME][:].astype(\"int32\").tofile(\"tokens.bin\")` writes its tokens, for --data-dtype int32"),
    (b"SQLite format 3\0", "it is a database of SQLite: write its text to a file"),
    (b"%PDF", PDF),
    (b"GGUF", "it is GGUF, weights for llama.cpp and no data"),
    (b"ORC", "it is ORC: `open(\"data.txt\", \"w\").write(\"\\n\".join(pandas.read_orc(FILE)[\"text\"]))` writes its column `text`"),
    (b"Obj\x01", "it is Avro: write its text to a file (`fastavro FILE` makes it JSON, `jq -r .text` takes the text of that)"),
    (
        b"MATLAB 5.0",
        "it is of MATLAB: `scipy.io.loadmat(FILE)[NAME].astype(\"int32\").tofile(\"tokens.bin\")` writes its tokens, for --data-dtype int32",
    ),
    // UTF-32 comes before UTF-16, as its little-endian mark begins with the one of UTF-16.
    (b"\xff\xfe\0\0", "it seems to be UTF-32: convert it (`iconv -f UTF-32 -t UTF-8`)"),
    (b"\0\0\xfe\xff", "it seems to be UTF-32: convert it (`iconv -f UTF-32 -t UTF-8`)"),
    (b"\xff\xfe", "it seems to be UTF-16: convert it (`iconv -f UTF-16 -t UTF-8`)"),
    (b"\xfe\xff", "it seems to be UTF-16: convert it (`iconv -f UTF-16 -t UTF-8`)"),
    (
        b"\x80",
        "it is a pickle, as of PyTorch: with `t = torch.load(FILE)`, or `pickle.load(open(FILE, \"rb\"))`, `numpy.asarray(t).astype(\"int32\")\
         .tofile(\"tokens.bin\")` writes its tokens, for --data-dtype int32",
    ),
];

const PDF: &str = "it is a PDF: extract its text (`pdftotext`)";

/// First characters of files whose bytes may all be text, and whose content is not.
const MARKUP: [(&[u8], &str); 3] = [
    (b"%PDF-", PDF),
    (b"{\\rtf", "it is RTF: save it as a text, or convert it (`pandoc -f rtf -t plain`)"),
    (b"version https://git-lfs.github.com/", "it is what Git LFS has in place of a file that was not fetched: `git lfs pull` fetches it"),
];

/// First words of llm.c's files that hold no stream of tokens.
const LLMC: [(u32, &str); 3] = [
    (20_240_522, "it is llm.c's evaluation data, questions with several endings: pass its training data"),
    (20_240_326, "it is a checkpoint of llm.c's, weights and no data"),
    (20_240_327, "it is a state of llm.c's training, no data"),
];

/// Of the index beside the tokens of Megatron's data sets: its first bytes, and of each code of an element how
/// `--data-dtype` calls it.
const INDEX: &[u8] = b"MMIDIDX\0\0";
const INDEXED: [(u8, &str); 2] = [(4, "int32"), (8, "uint16")];
/// Of those that it does not name, how numpy does.
const CONVERTED: [(u8, &str); 4] = [(1, "uint8"), (2, "int8"), (3, "int16"), (5, "int64")];

/// What a file that is no text seems to be, and what to do instead.
pub fn name(bytes: &[u8], path: &Path) -> Option<String> {
    let word = |k: usize| bytes.get(4 * k..4 * k + 4).map(|b| u32::from_le_bytes(b.try_into().expect("invariant: four bytes")));
    if let Some(index) = is_index(bytes) {
        return Some(index);
    }
    if let Some((_, what)) = LLMC.iter().find(|l| word(0) == Some(l.0)) {
        return Some((*what).into());
    }
    if let Some(what) = megatron(path) {
        return Some(what);
    }
    if bytes.starts_with(b"PK\x03\x04") {
        return Some(of_file(zip(&bytes[..bytes.len().min(512)]), path));
    }
    let header = bytes.get(..8).map(|b| u64::from_le_bytes(b.try_into().expect("invariant: eight bytes")));
    if header.is_some_and(|n| n < bytes.len() as u64) && bytes.get(8) == Some(&b'{') {
        return Some("it is safetensors, weights and no data: --init reads such".into());
    }
    // The first byte of a pickle says that it is one, and the second its version.
    let known = |(magic, _): &&(&[u8], &str)| bytes.starts_with(magic) && (*magic != b"\x80" || bytes.get(1).is_some_and(|v| (2..=5).contains(v)));
    if let Some((_, what)) = KNOWN.iter().find(known) {
        return Some(of_file(what, path));
    }
    if let Some((encoding, dtype)) = unmarked(&bytes[..bytes.len().min(LOOKED_AT) / 4 * 4]) {
        return Some(format!(
            "it seems to be {encoding} without its mark: convert it (`iconv -f {encoding} -t UTF-8`); if it is tokens, pass --data-dtype {dtype}"
        ));
    }
    // Tokens without a header may begin with any bytes.
    if bytes.len().is_multiple_of(2) && path.extension().is_some_and(|e| e == "bin") {
        return Some("if it is 16-bit tokens without a header, as nanoGPT writes them, pass --data-dtype uint16".into());
    }
    sniffed(bytes).map(|what| of_file(&what, path))
}

/// Why the bytes of a file that may be text as it is should not be trained on.
pub fn is_markup(bytes: &[u8]) -> Option<&'static str> {
    MARKUP.iter().find(|(magic, _)| bytes.starts_with(magic)).map(|(_, what)| *what)
}

/// What else is known by its first bytes.
fn sniffed(bytes: &[u8]) -> Option<String> {
    use infer::MatcherType;
    let found = infer::get(bytes)?;
    let mime = found.mime_type();
    match found.matcher_type() {
        MatcherType::Archive if mime == "application/x-tar" => Some("it is a tar archive: unpack it (`tar xf FILE`)".into()),
        MatcherType::Archive => Some(format!("it is an archive ({mime}): unpack it")),
        MatcherType::Image => Some(format!("it is an image ({mime}), and mcc reads those as arrays of floats (.npy)")),
        MatcherType::Audio | MatcherType::Video => Some(format!("it is a recording ({mime}), and mcc reads those as arrays of floats (.npy)")),
        MatcherType::Book | MatcherType::Doc => Some(format!("it is a document ({mime}): extract its text (`pandoc -t plain`)")),
        MatcherType::App => Some(format!("it is a program or its data ({mime}), and no text")),
        MatcherType::Font => Some(format!("it is a font ({mime}), and no text")),
        // Such a file is text in another encoding than UTF-8.
        MatcherType::Text | MatcherType::Custom => None,
    }
}

/// Bytes by which a text without a mark is known.
const LOOKED_AT: usize = 4096;

/// The encoding of a text in wide characters without a mark, and the tokens that it could be just as well. Only texts
/// of mostly Latin letters are known: their upper bytes are zero.
fn unmarked(start: &[u8]) -> Option<(&'static str, &'static str)> {
    let units = |read: fn([u8; 2]) -> u16| start.as_chunks().0.iter().map(move |b| read(*b));
    let wide = |read: fn([u8; 4]) -> u32| start.as_chunks().0.iter().map(move |b| char::from_u32(read(*b)));
    let utf16 = |read| is_prose(char::decode_utf16(units(read)).map(Result::ok));
    match () {
        () if is_prose(wide(u32::from_le_bytes)) => Some(("UTF-32LE", "uint32")),
        () if is_prose(wide(u32::from_be_bytes)) => Some(("UTF-32BE", "uint32")),
        () if utf16(u16::from_le_bytes) => Some(("UTF-16LE", "uint16")),
        () if utf16(u16::from_be_bytes) => Some(("UTF-16BE", "uint16")),
        () => None,
    }
}

/// Whether characters are those of a text, and most of them Latin. The last may be cut.
fn is_prose(characters: impl Iterator<Item = Option<char>>) -> bool {
    let characters: Vec<Option<char>> = characters.collect();
    let Some((_, but_last)) = characters.split_last() else { return false };
    let is_text = |c: &Option<char>| c.is_some_and(|c| !c.is_control() || matches!(c, '\t' | '\n' | '\r'));
    let latin = but_last.iter().flatten().filter(|c| c.is_ascii()).count();
    but_last.iter().all(is_text) && 2 * latin > but_last.len()
}

/// The same with the file's name in Python where it says `FILE`.
fn of_file(what: &str, path: &Path) -> String {
    what.replace("FILE", &format!("{:?}", path.file_name().unwrap_or_default().to_string_lossy()))
}

/// What an archive is, by the names in it.
fn zip(start: &[u8]) -> &'static str {
    let has = |name: &[u8]| start.windows(name.len()).any(|w| w == name);
    if has(b"data.pkl") || has(b"/version") {
        "it is a file of PyTorch's: `numpy.asarray(torch.load(FILE)).astype(\"int32\").tofile(\"tokens.bin\")` writes its tokens, for --data-dtype int32"
    } else if has(b".npy") {
        "it is an .npz, several arrays: `numpy.load(FILE)[NAME].astype(\"int32\").tofile(\"tokens.bin\")` writes one of tokens, for --data-dtype int32"
    } else if has(b"word/") {
        "it is a document of Word: extract its text (`pandoc -t plain FILE`)"
    } else if has(b"application/epub") {
        "it is an EPUB: extract its text (`pandoc -t plain FILE`)"
    } else {
        "it is a zip archive: unpack it (`unzip`)"
    }
}

/// The index of a Megatron data set.
pub fn is_index(bytes: &[u8]) -> Option<String> {
    bytes.starts_with(INDEX).then(|| format!("it is the index of a Megatron data set, whose tokens are in the .bin beside it: {}", tokens(bytes)))
}

/// Why tokens of a Megatron data set are not of the dtype that the user says, by the index beside them.
pub fn contradicted(path: &Path, dtype: &str) -> Option<String> {
    let mut index = vec![];
    File::open(path.with_extension("idx")).ok()?.take(64).read_to_end(&mut index).ok()?;
    let code = index.strip_prefix(INDEX)?.get(8)?;
    let (_, found) = INDEXED.iter().chain(&CONVERTED).find(|(c, _)| c == code)?;
    // Tokens are not negative, so both types have the same bytes.
    let is_same = *found == dtype || (*found, dtype) == ("int32", "uint32");
    (!is_same).then(|| format!("the index beside it says that its tokens are {found}, and --data-dtype says {dtype}: {}", tokens(&index)))
}

/// The tokens of a Megatron data set: a `.bin` with an index beside it.
fn megatron(path: &Path) -> Option<String> {
    let mut index = vec![];
    File::open(path.with_extension("idx")).ok()?.take(64).read_to_end(&mut index).ok()?;
    let is = path.extension().is_some_and(|e| e == "bin") && index.starts_with(INDEX);
    is.then(|| format!("it is the tokens of a Megatron data set: {}", tokens(&index)))
}

/// How to read tokens, by their index: magic, version in eight bytes, code of the element.
fn tokens(index: &[u8]) -> String {
    let code = index.get(INDEX.len() + 8);
    let find = |list: &[(u8, &'static str)]| list.iter().find(|(c, _)| Some(c) == code).map(|(_, dtype)| *dtype);
    match (find(&INDEXED), find(&CONVERTED)) {
        (Some(dtype), _) => format!("--data NAME.bin --data-dtype {dtype} reads them as one stream, document after document"),
        (None, Some(dtype)) => {
            format!("`numpy.fromfile(\"NAME.bin\", \"{dtype}\").astype(\"int32\").tofile(\"tokens.bin\")` writes them for --data-dtype int32")
        }
        (None, None) => "its index says that they are no whole numbers".into(),
    }
}

/// Whether a file is JSON, one value or one per line, as far as it can be seen at its start. If there is `more`, the
/// last may be cut. Numbers and words in quotes alone are text. What begins as an object does is JSON however it goes
/// on: a line that is cut or wrong makes no prose of it.
pub fn is_json(start: &[u8], more: bool) -> bool {
    let mut start = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start).trim_ascii_start();
    // Some programs write a comment first.
    while start.starts_with(b"#") || start.starts_with(b"//") {
        let line = start.iter().position(|b| *b == b'\n').unwrap_or(start.len());
        start = start[line..].trim_ascii_start();
    }
    if begins_object(start) || start.strip_prefix(b"[").is_some_and(|rest| begins_object(rest.trim_ascii_start())) {
        return true;
    }
    let mut values = serde_json::Deserializer::from_slice(start).into_iter::<IgnoredAny>();
    loop {
        let at = values.byte_offset();
        match start[at..].trim_ascii_start().first() {
            None => return at > 0,
            Some(b'{' | b'[') => {}
            Some(_) => return false,
        }
        match values.next() {
            None => return true,
            Some(Ok(IgnoredAny)) => {}
            Some(Err(e)) => return e.is_eof() && more,
        }
    }
}

/// `{"key":`
fn begins_object(text: &[u8]) -> bool {
    let Some(key) = text.strip_prefix(b"{").map(<[u8]>::trim_ascii_start).and_then(|rest| rest.strip_prefix(b"\"")) else { return false };
    let end = key.iter().position(|b| *b == b'"' || *b == b'\n').filter(|k| key[*k] == b'"');
    end.is_some_and(|end| key[end + 1..].trim_ascii_start().starts_with(b":"))
}
