//! Documents read one after the other, in batches.

use super::error::TextError;
use flate2::bufread::MultiGzDecoder;
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that a line, or a file of plain text, has at most.
pub const LONGEST: u64 = 1 << 30;

/// How a file holds documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A JSON object a line.
    Lines,
    /// One document.
    Plain,
}

/// How far reading has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// The file that is read next.
    pub input: usize,
    /// Its bytes that were read, decompressed.
    pub offset: u64,
    /// Its lines that were read.
    pub line: u64,
}

/// Documents that are not looked into yet.
pub struct Batch {
    file: PathBuf,
    kind: Kind,
    /// Each line or text, with its number counted from 1.
    documents: Vec<(u64, Vec<u8>)>,
    /// Where the next batch begins.
    pub end: Position,
    pub bytes: usize,
}

/// Reads all documents of some files.
pub struct Documents {
    inputs: Vec<(PathBuf, Kind)>,
    open: Option<Box<dyn BufRead + Send>>,
    at: Position,
    /// Bytes of the files as they are on the disk.
    read: Arc<AtomicU64>,
}

/// Counts what is read of a file.
struct Counted(File, Arc<AtomicU64>);

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(buffer)?;
        self.1.fetch_add(read as u64, Ordering::Relaxed);
        Ok(read)
    }
}

fn kind(file: &Path) -> Result<Kind, TextError> {
    let extension = |f: &Path| f.extension().and_then(|e| e.to_str()).unwrap_or_default().to_lowercase();
    let of = match extension(file).as_str() {
        "gz" | "zst" => extension(Path::new(file.file_stem().unwrap_or_default())),
        other => other.into(),
    };
    match of.as_str() {
        "jsonl" | "json" | "ndjson" => Ok(Kind::Lines),
        "txt" => Ok(Kind::Plain),
        "parquet" => Err(TextError::Kind { file: file.into(), what: "Parquet is not read: write its rows as JSON lines first".into() }),
        "" => Err(TextError::Kind { file: file.into(), what: "its name does not end with what it holds".into() }),
        other => Err(TextError::Kind { file: file.into(), what: format!("`.{other}` is no text that is known") }),
    }
}

impl Documents {
    /// # Errors
    /// No file; one of a kind that is not known.
    pub fn new(files: &[PathBuf], at: Position) -> Result<Documents, TextError> {
        if files.is_empty() {
            return Err(TextError::Nothing);
        }
        let inputs = files.iter().map(|f| Ok((f.clone(), kind(f)?))).collect::<Result<_, TextError>>()?;
        Ok(Documents { inputs, open: None, at, read: Arc::default() })
    }

    /// Bytes that were read, as files have them.
    pub fn read(&self) -> Arc<AtomicU64> {
        self.read.clone()
    }

    /// Opens a file where it is to be read on.
    fn open(&self, file: &Path) -> io::Result<Box<dyn BufRead + Send>> {
        let file = File::open(file)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
        }
        let mut raw = BufReader::with_capacity(1 << 18, Counted(file, self.read.clone()));
        let begin = raw.fill_buf()?;
        let mut out: Box<dyn BufRead + Send> = match begin {
            [0x1f, 0x8b, ..] => Box::new(BufReader::with_capacity(1 << 18, MultiGzDecoder::new(raw))),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Box::new(BufReader::with_capacity(1 << 18, zstd::Decoder::with_buffer(raw)?)),
            _ => {
                let looked_at = raw.buffer().len() as u64;
                let mut counted = raw.into_inner();
                counted.0.seek(SeekFrom::Start(self.at.offset))?;
                counted.1.fetch_sub(looked_at, Ordering::Relaxed);
                counted.1.fetch_add(self.at.offset, Ordering::Relaxed);
                return Ok(Box::new(BufReader::with_capacity(1 << 18, counted)));
            }
        };
        io::copy(&mut out.by_ref().take(self.at.offset), &mut io::sink())?;
        Ok(out)
    }

    /// The next documents, of one file, of so many bytes or one document; none after the last.
    ///
    /// # Errors
    /// What the file system or a decompressor says; a document that is too long.
    pub fn batch(&mut self, bytes: usize) -> Result<Option<Batch>, TextError> {
        let Some((file, kind)) = self.inputs.get(self.at.input).cloned() else { return Ok(None) };
        let io = |cause| TextError::Io { file: file.clone(), cause };
        let mut reader = match self.open.take() {
            Some(reader) => reader,
            None => self.open(&file).map_err(io)?,
        };
        let mut batch = Batch { file: file.clone(), kind, documents: vec![], end: self.at, bytes: 0 };
        while batch.bytes < bytes {
            let mut text = vec![];
            let mut limited = reader.by_ref().take(LONGEST + 1);
            let read = match kind {
                Kind::Lines => limited.read_until(b'\n', &mut text),
                Kind::Plain => limited.read_to_end(&mut text),
            };
            let read = read.map_err(io)?;
            self.at.offset += read as u64;
            self.at.line += 1;
            if text.len() as u64 > LONGEST {
                let what = "it has more than 1 GiB, which is no document: split it".into();
                return Err(TextError::Line { file, line: self.at.line, column: None, what });
            }
            if read > 0 {
                batch.bytes += read;
                batch.documents.push((self.at.line, text));
            }
            if read == 0 || kind == Kind::Plain {
                self.at = Position { input: self.at.input + 1, ..Position::default() };
                batch.end = self.at;
                return Ok(Some(batch));
            }
        }
        self.open = Some(reader);
        batch.end = self.at;
        Ok(Some(batch))
    }
}

impl Batch {
    /// Gives each document's texts: those of the field of a JSON object, or the one of a file.
    ///
    /// # Errors
    /// A line that is no JSON object with such a field; text that is not UTF-8; what `each` says.
    pub fn texts(&self, field: &str, mut each: impl FnMut(&[String]) -> Result<(), String>) -> Result<(), TextError> {
        for (line, bytes) in &self.documents {
            let error = |column, what| TextError::Line { file: self.file.clone(), line: *line, column, what };
            match self.kind {
                Kind::Lines if bytes.trim_ascii().is_empty() => {}
                Kind::Lines => {
                    let texts = field_of(bytes, field).map_err(|(column, what)| error(column, what))?;
                    each(&texts).map_err(|what| error(None, what))?;
                }
                Kind::Plain => {
                    let text = String::from_utf8(bytes.clone()).map_err(|e| {
                        let at = e.utf8_error().valid_up_to();
                        let line = 1 + bytes[..at].iter().filter(|b| **b == b'\n').count() as u64;
                        let what = format!("byte {at} of the file is not UTF-8: convert it, for example with iconv");
                        TextError::Line { file: self.file.clone(), line, column: None, what }
                    })?;
                    each(&[text]).map_err(|what| error(None, what))?;
                }
            }
        }
        Ok(())
    }
}

/// The field's text or texts; else the column and what is wrong.
fn field_of(line: &[u8], field: &str) -> Result<Vec<String>, (Option<usize>, String)> {
    let text = std::str::from_utf8(line)
        .map_err(|e| (Some(e.valid_up_to() + 1), "it is not UTF-8 from here on: convert the file, for example with iconv".to_string()))?;
    let mut reader = serde_json::Deserializer::from_str(text);
    let read = reader.deserialize_map(Field(field)).and_then(|texts| reader.end().map(|()| texts));
    match read {
        Ok(texts) => texts.ok_or_else(|| (None, format!("it has no field `{field}`: name the field that has the text"))),
        Err(e) => {
            let what = e.to_string();
            let what = what.rsplit_once(" at line ").map_or(what.as_str(), |(what, _)| what);
            Err((Some(e.column().max(1)), format!("{what}: each line is a JSON object whose field `{field}` is a text")))
        }
    }
}

/// Reads an object and keeps one field. Of several with its name it keeps the last, as Python does.
struct Field<'a>(&'a str);

impl<'de> Visitor<'de> for Field<'_> {
    type Value = Option<Vec<String>>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(key) = map.next_key::<String>()? {
            if key == self.0 {
                found = Some(map.next_value::<Texts>()?.0);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// A text, or several, which become sequences of one document.
struct Texts(Vec<String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Texts, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Texts;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                write!(f, "a text or a list of texts")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Texts, E> {
                Ok(Texts(vec![text.into()]))
            }

            fn visit_string<E: de::Error>(self, text: String) -> Result<Texts, E> {
                Ok(Texts(vec![text]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Texts, A::Error> {
                let mut texts = vec![];
                while let Some(text) = list.next_element()? {
                    texts.push(text);
                }
                Ok(Texts(texts))
            }
        }
        from.deserialize_any(Either)
    }
}
