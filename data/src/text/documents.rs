//! Documents read one after the other, in batches.

use super::bounds::LONGEST;
use super::chat::{Chat, RenderedChat};
use super::error::TextError;
use super::parquet::{Row, Table};
use flate2::bufread::MultiGzDecoder;
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a file holds documents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileFormat {
    /// A JSON object a line.
    Lines,
    /// One document.
    Plain,
    /// Parquet: a row each.
    Rows,
}

/// What of a JSON object, or of a row of a table, is read.
#[derive(Clone)]
pub struct Fields {
    /// The field, or the column, that has the text, or a list of texts; or the messages of a chat.
    pub text: String,
    /// The one with what comes before the text and is not learnt. The text is one then.
    pub prompt: Option<String>,
    /// Template that makes a text of messages.
    pub chat: Option<Arc<Chat>>,
}

impl Fields {
    /// Fields of texts of which all is learnt.
    pub fn of_texts(field: &str) -> Fields {
        Fields { text: field.into(), prompt: None, chat: None }
    }

    /// Whether only some of a text is learnt.
    pub fn has_mask(&self) -> bool {
        self.prompt.is_some() || self.chat.is_some()
    }
}

/// What a document is made of.
pub struct Document<'a> {
    pub texts: &'a [&'a str],
    /// Bytes of the text that are learnt, where that is not all.
    pub learnt: Option<&'a [Range<usize>]>,
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
    /// Row group that is read next, in a Parquet file.
    pub group: u64,
    /// Its rows that were read.
    pub row: u64,
}

/// Documents that are not looked into yet.
pub struct Batch {
    file: PathBuf,
    documents: RawDocuments,
    /// Where the next batch begins.
    pub end: Position,
    pub bytes: usize,
    /// Bytes of all files, as they are on the disk, that were read until its end.
    pub read: u64,
}

/// Documents as they stand in a file.
enum RawDocuments {
    /// Each line, with its number counted from 1.
    Lines(Vec<(u64, Vec<u8>)>),
    Plain(Vec<u8>),
    /// Texts, and the prompts before them.
    Rows(Vec<(Row, Option<Row>)>),
}

/// A file that is being read.
enum Reader {
    Bytes(Box<dyn BufRead + Send>),
    Rows(Box<Columns>),
}

/// The columns of a table that are read.
struct Columns {
    file: PathBuf,
    texts: Table,
    prompts: Option<Table>,
}

impl Columns {
    fn open(file: &Path, fields: &Fields, at: (u64, u64)) -> Result<Columns, TextError> {
        let prompts = fields.prompt.as_ref().map(|column| Table::open(file, column, at)).transpose()?;
        Ok(Columns { file: file.into(), texts: Table::open(file, &fields.text, at)?, prompts })
    }

    /// What each has of the next row; none after the last.
    fn row(&mut self) -> Result<Option<(Row, Option<Row>)>, TextError> {
        let Some(row) = self.texts.row()? else { return Ok(None) };
        let Some(prompts) = &mut self.prompts else { return Ok(Some((row, None))) };
        match prompts.row()? {
            Some(prompt) if (prompt.group, prompt.row) == (row.group, row.row) => Ok(Some((row, Some(prompt)))),
            Some(_) | None => {
                let what = "the column of prompts has no such row: the file is damaged".into();
                Err(TextError::Row { file: self.file.clone(), group: row.group, row: row.row, what })
            }
        }
    }
}

/// Reads all documents of some files.
pub struct Documents {
    inputs: Vec<(PathBuf, FileFormat)>,
    fields: Fields,
    open: Option<Reader>,
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

fn format(file: &Path) -> Result<FileFormat, TextError> {
    let extension = |f: &Path| f.extension().and_then(|e| e.to_str()).unwrap_or_default().to_lowercase();
    let of = match extension(file).as_str() {
        "gz" | "zst" => extension(Path::new(file.file_stem().unwrap_or_default())),
        other => other.into(),
    };
    match of.as_str() {
        "jsonl" | "json" | "ndjson" => Ok(FileFormat::Lines),
        "txt" => Ok(FileFormat::Plain),
        "parquet" if extension(file) == "parquet" => Ok(FileFormat::Rows),
        "parquet" => {
            Err(TextError::Kind { file: file.into(), what: "decompress it first: a Parquet file is not read from its begin to its end".into() })
        }
        "" => Err(TextError::Kind { file: file.into(), what: "its name does not end with what it holds".into() }),
        other => Err(TextError::Kind { file: file.into(), what: format!("`.{other}` is no text that is known") }),
    }
}

impl Documents {
    /// Of JSON lines, documents are what the field has; of Parquet, what the column of this name has.
    ///
    /// # Errors
    /// No file; one of a kind that is not known, or that has no prompts.
    pub fn new(files: &[PathBuf], fields: &Fields, at: Position) -> Result<Documents, TextError> {
        if files.is_empty() {
            return Err(TextError::Nothing);
        }
        let inputs = files.iter().map(|f| Ok((f.clone(), format(f)?))).collect::<Result<Vec<_>, TextError>>()?;
        if let Some((file, _)) = inputs.iter().find(|(_, format)| *format == FileFormat::Plain && fields.prompt.is_some()) {
            return Err(TextError::Promptless(file.clone()));
        }
        if let Some((file, _)) = inputs.iter().find(|(_, format)| *format != FileFormat::Lines && fields.chat.is_some()) {
            return Err(TextError::Unspoken(file.clone()));
        }
        Ok(Documents { inputs, fields: fields.clone(), open: None, at, read: Arc::default() })
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
        let Some((file, format)) = self.inputs.get(self.at.input).cloned() else { return Ok(None) };
        let reader = match self.open.take() {
            Some(reader) => reader,
            None if format == FileFormat::Rows => Reader::Rows(Box::new(Columns::open(&file, &self.fields, (self.at.group, self.at.row))?)),
            None => Reader::Bytes(self.open(&file).map_err(|cause| TextError::Io { file: file.clone(), cause })?),
        };
        let mut batch = Batch { file, documents: RawDocuments::Rows(vec![]), end: self.at, bytes: 0, read: 0 };
        let on = match reader {
            Reader::Bytes(reader) => self.text(reader, format, bytes, &mut batch)?.map(Reader::Bytes),
            Reader::Rows(rows) => self.rows(rows, bytes, &mut batch)?.map(Reader::Rows),
        };
        if on.is_none() {
            self.at = Position { input: self.at.input + 1, ..Position::default() };
        }
        self.open = on;
        batch.end = self.at;
        batch.read = self.read.load(Ordering::Relaxed);
        Ok(Some(batch))
    }

    /// Fills a batch, and gives the reader back if there is more.
    fn text<R: BufRead>(&mut self, mut reader: R, format: FileFormat, bytes: usize, batch: &mut Batch) -> Result<Option<R>, TextError> {
        let mut lines = vec![];
        while batch.bytes < bytes {
            let mut text = vec![];
            let mut limited = reader.by_ref().take(LONGEST + 1);
            let read = match format {
                FileFormat::Plain => limited.read_to_end(&mut text),
                FileFormat::Lines | FileFormat::Rows => limited.read_until(b'\n', &mut text),
            };
            let read = read.map_err(|cause| TextError::Io { file: batch.file.clone(), cause })?;
            self.at.offset += read as u64;
            self.at.line += 1;
            if text.len() as u64 > LONGEST {
                let what = "it has more than 1 GiB, which is no document: split it".into();
                return Err(TextError::Line { file: batch.file.clone(), line: self.at.line, column: None, what });
            }
            batch.bytes += read;
            if format == FileFormat::Plain {
                batch.documents = RawDocuments::Plain(text);
                return Ok(None);
            }
            if read == 0 {
                batch.documents = RawDocuments::Lines(lines);
                return Ok(None);
            }
            lines.push((self.at.line, text));
        }
        batch.documents = RawDocuments::Lines(lines);
        Ok(Some(reader))
    }

    /// Does what [`Documents::text`] does, for a Parquet file.
    fn rows(&mut self, mut table: Box<Columns>, bytes: usize, batch: &mut Batch) -> Result<Option<Box<Columns>>, TextError> {
        let mut found = vec![];
        while batch.bytes < bytes {
            let Some(row) = table.row()? else {
                self.read.fetch_add(table.texts.uncounted(), Ordering::Relaxed);
                batch.documents = RawDocuments::Rows(found);
                return Ok(None);
            };
            // The memory that a row takes beside its texts counts, too.
            let texts = row.1.iter().chain([&row.0]).flat_map(|row| &row.texts);
            batch.bytes += texts.map(|text| text.len() + size_of::<usize>()).sum::<usize>() + size_of::<usize>();
            found.push(row);
        }
        self.read.fetch_add(table.texts.uncounted(), Ordering::Relaxed);
        (self.at.group, self.at.row) = table.texts.next();
        batch.documents = RawDocuments::Rows(found);
        Ok(Some(table))
    }
}

impl Batch {
    /// Gives each document's texts: those of the fields of a JSON object, the one of a file, or those of a row.
    ///
    /// # Errors
    /// A line that is no JSON object with such fields; text that is not UTF-8; a list of texts where there are
    /// prompts; what `each` says.
    pub fn texts(&self, fields: &Fields, mut each: impl FnMut(&Document) -> Result<(), String>) -> Result<(), TextError> {
        let mut document = |texts: &[&str], rendered: Option<RenderedChat>| match rendered {
            Some(rendered) => each(&Document { texts: &[&rendered.text], learnt: Some(&rendered.learnt) }),
            None => each(&Document { texts, learnt: None }),
        };
        match &self.documents {
            RawDocuments::Lines(lines) => {
                for (line, bytes) in lines.iter().filter(|(_, bytes)| !bytes.trim_ascii().is_empty()) {
                    let wrong = |column, what| TextError::Line { file: self.file.clone(), line: *line, column, what };
                    if let Some(chat) = &fields.chat {
                        let rendered = chat.line(bytes, &fields.text).map_err(|(column, what)| wrong(column, what))?;
                        document(&[], Some(rendered)).map_err(|what| wrong(None, what))?;
                        continue;
                    }
                    let (texts, prompt) = fields_of(bytes, fields).map_err(|(column, what)| wrong(column, what))?;
                    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
                    let prompt: Option<Vec<&str>> = prompt.as_ref().map(|p| p.iter().map(String::as_str).collect());
                    let rendered = prompt.map(|prompt| answered(&prompt, &texts, fields)).transpose();
                    rendered.and_then(|rendered| document(&texts, rendered)).map_err(|what| wrong(None, what))?;
                }
            }
            RawDocuments::Plain(bytes) => {
                let wrong = |line, what| TextError::Line { file: self.file.clone(), line, column: None, what };
                let text = std::str::from_utf8(bytes).map_err(|e| {
                    let at = e.valid_up_to();
                    let line = 1 + bytes[..at].iter().filter(|b| **b == b'\n').count() as u64;
                    wrong(line, format!("byte {at} of the file is not UTF-8: convert it, for example with iconv"))
                })?;
                document(&[text], None).map_err(|what| wrong(1, what))?;
            }
            RawDocuments::Rows(rows) => {
                for (row, prompt) in rows {
                    let wrong = |what| TextError::Row { file: self.file.clone(), group: row.group, row: row.row, what };
                    let texts = decoded(row).map_err(wrong)?;
                    let prompt = prompt.as_ref().map(decoded).transpose().map_err(wrong)?;
                    let rendered = prompt.map(|prompt| answered(&prompt, &texts, fields)).transpose();
                    rendered.and_then(|rendered| document(&texts, rendered)).map_err(wrong)?;
                }
            }
        }
        Ok(())
    }
}

/// A prompt and the answer to it as one text, of which the answer is learnt to the end, with what is added there.
fn answered(prompt: &[&str], texts: &[&str], fields: &Fields) -> Result<RenderedChat, String> {
    let prompt = one(prompt, fields.prompt.as_deref().unwrap_or_default())?;
    Ok(RenderedChat { text: [prompt, one(texts, &fields.text)?].concat(), learnt: std::iter::once(prompt.len()..usize::MAX).collect() })
}

/// The only text of a field, where prompts and answers are one each.
fn one<'a>(texts: &[&'a str], field: &str) -> Result<&'a str, String> {
    match texts {
        [one] => Ok(one),
        _ => Err(format!("`{field}` has a list of {} texts, and beside a prompt it is one: join them", texts.len())),
    }
}

/// The texts of a row.
fn decoded(row: &Row) -> Result<Vec<&str>, String> {
    let texts = row.texts.iter().map(|text| std::str::from_utf8(text.data()));
    texts.collect::<Result<_, _>>().map_err(|e| format!("byte {} of its text is not UTF-8", e.valid_up_to()))
}

/// The texts of a field; the same of the prompt's, if there is one.
type FieldTexts = (Vec<String>, Option<Vec<String>>);

/// What the fields have; else the column and what is wrong.
fn fields_of(line: &[u8], fields: &Fields) -> Result<FieldTexts, (Option<usize>, String)> {
    let text = std::str::from_utf8(line)
        .map_err(|e| (Some(e.valid_up_to() + 1), "it is not UTF-8 from here on: convert the file, for example with iconv".to_string()))?;
    let mut reader = serde_json::Deserializer::from_str(text);
    let missing = |field: &str| (None, format!("it has no field `{field}`: name the field that has the text"));
    match reader.deserialize_map(FieldVisitor(fields)).and_then(|found| reader.end().map(|()| found)) {
        Ok([texts, prompt]) => {
            let texts = texts.ok_or_else(|| missing(&fields.text))?;
            let prompt = fields.prompt.as_ref().map(|field| prompt.ok_or_else(|| missing(field))).transpose()?;
            Ok((texts, prompt))
        }
        Err(e) => {
            let what = e.to_string();
            let what = what.rsplit_once(" at line ").map_or(what.as_str(), |(what, _)| what);
            let says = match &fields.prompt {
                Some(prompt) => format!("{what}: each line is a JSON object whose fields `{}` and `{prompt}` are texts", fields.text),
                None => format!("{what}: each line is a JSON object whose field `{}` is a text", fields.text),
            };
            Err((Some(e.column().max(1)), says))
        }
    }
}

/// Reads an object and keeps some fields. Of several with one name it keeps the last, as Python does.
struct FieldVisitor<'a>(&'a Fields);

impl<'de> Visitor<'de> for FieldVisitor<'_> {
    /// Texts of the text field and of the prompt field.
    type Value = [Option<Vec<String>>; 2];

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let [mut texts, mut prompt] = [const { None }; 2];
        while let Some(key) = map.next_key::<String>()? {
            let (is_text, is_prompt) = (key == self.0.text, self.0.prompt.as_ref() == Some(&key));
            if !is_text && !is_prompt {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let found = map.next_value::<Texts>()?.0;
            if is_prompt {
                prompt = Some(found.clone());
            }
            if is_text {
                texts = Some(found);
            }
        }
        Ok([texts, prompt])
    }
}

/// A text, or several, which become sequences of one document.
struct Texts(Vec<String>);

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Texts, D::Error> {
        struct TextsVisitor;
        impl<'de> Visitor<'de> for TextsVisitor {
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
        from.deserialize_any(TextsVisitor)
    }
}
