//! Files of tokens one after the other: texts, llm.c's, and those that say nothing of what they hold.

use super::foreign;
use super::format::{DataFormat, Encoding, FileDType, FormatSource};
use std::path::Path;

/// Bytes of llm.c's headers: 256 words; the magic, the version, the number of tokens.
const HEADER: usize = 1024;

/// Bytes that are enough to know a file of another kind.
const START: usize = 1 << 16;

/// Bytes that are looked at for zeros and for UTF-8 while they are near.
const CHUNK: usize = 1 << 18;

/// llm.c's files of tokens: magic, version, element.
const LLMC: [(u32, u32, FileDType); 2] = [(20_240_520, 1, FileDType::U16), (20_240_801, 7, FileDType::U32)];

/// What a file holds, and its first element's byte.
///
/// # Errors
/// What it is instead, and what to do then.
pub fn open(bytes: &[u8], path: &Path, encoding: Encoding) -> Result<(DataFormat, usize), String> {
    let word = |k: usize| bytes.get(4 * k..4 * k + 4).map(|b| u32::from_le_bytes(b.try_into().expect("invariant: four bytes")));
    if let Some((magic, version, element)) = LLMC.iter().find(|l| word(0) == Some(l.0)) {
        let (found, tokens) = (word(1).unwrap_or(0), u64::from(word(2).unwrap_or(0)));
        let here = bytes.len().checked_sub(HEADER).ok_or("it begins as llm.c's files do, but ends within the header")?;
        if found != *version {
            let bits = 8 * element.bytes();
            return Err(format!("its llm.c version is {found}; of files that begin with {magic}, only {version} ({bits}-bit tokens) is known"));
        }
        if tokens * element.bytes() as u64 != here as u64 {
            return Err(format!("it says {tokens} tokens, but has {}; it was cut or joined: write it again", here / element.bytes()));
        }
        return Ok((DataFormat::Stream { element: *element, tokens, named: FormatSource::ByItself }, HEADER));
    }
    let dtype = match encoding {
        Encoding::U16 => Some("uint16"),
        Encoding::U32 => Some("uint32"),
        Encoding::I32 => Some("int32"),
        Encoding::Text | Encoding::Bytes => None,
    };
    if let Some(what) = dtype.and_then(|dtype| foreign::contradicted(path, dtype)) {
        return Err(what);
    }
    let element = match encoding {
        Encoding::Text => {
            if let Some(wrong) = wrong(&bytes[..bytes.len().min(START)], bytes.len() > START) {
                return Err(refused(&wrong, bytes, path));
            }
            if foreign::is_json(&bytes[..bytes.len().min(START)], bytes.len() > START) {
                return Err(
                    "it is JSON, whose bytes are braces and quotes too: extract the text (`jq -r .text`), or pass --bytes to train on it as it is"
                        .into(),
                );
            }
            if let Some(what) = foreign::is_markup(bytes) {
                return Err(format!("{what}, or pass --bytes to train on it as it is"));
            }
            FileDType::U8
        }
        Encoding::Bytes => FileDType::U8,
        Encoding::U16 => FileDType::U16,
        Encoding::U32 => FileDType::U32,
        Encoding::I32 => FileDType::I32,
    };
    if let Some(index) = foreign::is_index(bytes).filter(|_| encoding != Encoding::Bytes) {
        return Err(index);
    }
    if !bytes.len().is_multiple_of(element.bytes()) {
        return Err(format!("its {} bytes are no whole number of {}-bit tokens", bytes.len(), 8 * element.bytes()));
    }
    let named = match encoding {
        Encoding::Text => FormatSource::AsText,
        Encoding::Bytes | Encoding::U16 | Encoding::U32 | Encoding::I32 => FormatSource::ByUser,
    };
    Ok((DataFormat::Stream { element, tokens: (bytes.len() / element.bytes()) as u64, named }, 0))
}

/// Reads all of a text.
///
/// # Errors
/// The first byte that is none of a text.
pub fn check_text(bytes: &[u8], path: &Path) -> Result<(), String> {
    wrong(bytes, false).map_or(Ok(()), |wrong| Err(refused(&wrong, bytes, path)))
}

/// Why bytes are no text.
#[derive(Debug, PartialEq, Eq)]
struct InvalidText {
    at: usize,
    what: &'static str,
}

/// The first byte that is none of a text. If there is `more`, the last character may be cut.
fn wrong(bytes: &[u8], more: bool) -> Option<InvalidText> {
    let mut at = 0;
    while at < bytes.len() {
        let chunk = &bytes[at..bytes.len().min(at + CHUNK)];
        let utf8 = simdutf8::compat::from_utf8(chunk).map_or_else(|e| (e.valid_up_to(), e.error_len().is_some()), |_| (chunk.len(), false));
        if let Some(zero) = chunk[..utf8.0].contains(&0).then(|| chunk.iter().position(|b| *b == 0)).flatten() {
            return Some(InvalidText { at: at + zero, what: "is zero" });
        }
        let last = at + chunk.len() == bytes.len();
        match utf8 {
            (valid, true) => return Some(InvalidText { at: at + valid, what: "is not UTF-8" }),
            (valid, false) if valid < chunk.len() && last => {
                return (!more).then_some(InvalidText { at: at + valid, what: "begins a character of UTF-8 that the file's end cuts off" });
            }
            (valid, false) => at += valid,
        }
    }
    None
}

fn refused(wrong: &InvalidText, bytes: &[u8], path: &Path) -> String {
    let InvalidText { at, what } = wrong;
    let is = foreign::name(bytes, path).unwrap_or_else(|| "if it is a text, make it UTF-8 without zeros (`iconv -f LATIN1 -t UTF-8`)".into());
    format!("byte {at} ({:#04x}) {what}, so its bytes are no tokens: {is}; or pass --bytes to train on its bytes as they are", bytes[*at])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_that_is_no_text_is_found_across_chunks() {
        let text = |n: usize| "aä€😀".repeat(n).into_bytes();
        let whole = text(2 * CHUNK / 10 + 7);
        assert_eq!(wrong(&whole, false), None);
        for at in [0, 1, CHUNK - 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5] {
            // The byte is inserted in front of the character there.
            let at = (at..).find(|k| whole[*k] & 0xc0 != 0x80).unwrap();
            for (byte, what) in [(0xff, "is not UTF-8"), (0, "is zero")] {
                let mut bytes = whole.clone();
                bytes.insert(at, byte);
                assert_eq!(wrong(&bytes, false), Some(InvalidText { at, what }), "{at}");
            }
        }
        let cut = &whole[..whole.len() - 1];
        let at = whole.len() - 4;
        assert_eq!(wrong(cut, false), Some(InvalidText { at, what: "begins a character of UTF-8 that the file's end cuts off" }));
        assert_eq!(wrong(cut, true), None);
    }
}
