//! A column of a Parquet file, row by row.
//!
//! | file | does |
//! |---|---|
//! | `mod.rs` | finds the column and gives its rows |
//! | `pages.rs` | gives the crate `parquet` pages that claim no more than their bytes can be |
//! | `thrift.rs` | shows the same of footers and headers of pages |

mod pages;
mod thrift;

use self::pages::{Bytewise, Pages};
use super::bounds::unwound;
use super::error::TextError;
use parquet::basic::{ConvertedType, LogicalType, Repetition, Type as Physical};
use parquet::column::reader::ColumnReaderImpl;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::Result as Parsed;
use parquet::file::metadata::{ParquetMetaData, ParquetMetaDataReader};
use parquet::schema::types::{ColumnDescriptor, SchemaDescriptor};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a column holds texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Text,
    /// A list has an element where the level of definition is as large.
    List(i16),
}

/// A row, whose texts are not looked into yet.
pub struct Row {
    pub group: u64,
    /// Number of the row in its row group.
    pub row: u64,
    pub texts: Vec<ByteArray>,
}

/// A column that is being read.
pub struct Table {
    path: PathBuf,
    of: Arc<Bytewise>,
    about: ParquetMetaData,
    column: usize,
    shape: Shape,
    group: u64,
    row: u64,
    open: Option<ColumnReaderImpl<ByteArrayType>>,
    /// What pages claimed since the last row.
    texts: Arc<AtomicU64>,
    counted: u64,
}

impl Table {
    /// Opens a file's column where it is to be read on.
    ///
    /// # Errors
    /// What the file system says; a file that is no Parquet; no such column; one that has no texts.
    pub fn open(path: &Path, column: &str, (group, row): (u64, u64)) -> Result<Table, TextError> {
        let io = |cause| TextError::Io { file: path.into(), cause };
        let wrong = |what: String| TextError::Table { file: path.into(), what };
        let file = File::open(path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if !metadata.is_file() {
            return Err(io(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")));
        }
        let of = Arc::new(Bytewise { file, length: metadata.len() });
        let footer = footer(&of).map_err(io)?.map_err(|what| wrong(what.into()))?;
        let about = guarded(|| ParquetMetaDataReader::decode_metadata(&footer)).map_err(|e| wrong(format!("its footer is damaged: {e}")))?;
        let (column, shape) = find(about.file_metadata().schema_descr(), column).map_err(wrong)?;
        let mut table = Table { path: path.into(), of, about, column, shape, group, row: 0, open: None, texts: Arc::default(), counted: 0 };
        for _ in 0..row {
            table.row()?;
        }
        Ok(table)
    }

    /// The row that comes next: its row group, and its number there.
    pub fn next(&self) -> (u64, u64) {
        (self.group, self.row)
    }

    /// Bytes of the file that its rows are a part of, as far as this did not say so before.
    pub fn uncounted(&mut self) -> u64 {
        let rows = |groups: usize| self.about.row_groups().iter().take(groups).map(|g| g.num_rows() as f64).sum::<f64>();
        let group = self.group as usize;
        let done = match self.about.row_groups().len() > group {
            true => self.of.length as f64 * (rows(group) + self.row as f64) / rows(usize::MAX),
            false => self.of.length as f64,
        };
        let more = (done as u64).min(self.of.length).saturating_sub(self.counted);
        self.counted += more;
        more
    }

    /// The next row; none after the last.
    ///
    /// # Errors
    /// A row that is null; a page that cannot be read.
    pub fn row(&mut self) -> Result<Option<Row>, TextError> {
        loop {
            let Some(about) = self.about.row_groups().get(self.group as usize) else { return Ok(None) };
            let last = self.row >= about.num_rows().max(0) as u64;
            let (open, texts) = (self.open.take(), self.texts.clone());
            let read = guarded(|| -> Parsed<_> {
                let mut reader = match open {
                    Some(reader) => reader,
                    None => {
                        let pages = Pages::new(self.of.clone(), about, self.column, texts.clone())?;
                        ColumnReaderImpl::new(about.column(self.column).column_descr_ptr(), Box::new(pages))
                    }
                };
                texts.store(0, Ordering::Relaxed);
                let (mut definitions, mut repetitions, mut values) = (vec![], vec![], vec![]);
                let (rows, ..) = reader.read_records(1, Some(&mut definitions), Some(&mut repetitions), &mut values)?;
                Ok((reader, rows, definitions, values))
            });
            let wrong = |what: String| TextError::Row { file: self.path.clone(), group: self.group, row: self.row, what };
            let (reader, rows, definitions, values) = read.map_err(wrong)?;
            match (last, rows) {
                (true, 0) => (self.group, self.row) = (self.group + 1, 0),
                (true, _) => return Err(wrong("the row group has more rows than the file's footer says".into())),
                (false, 0) => return Err(wrong(format!("the row group ends here, and has {} rows by the file's footer", about.num_rows()))),
                (false, _) => {
                    let most = about.column(self.column).column_descr().max_def_level();
                    let texts = texts_of(self.shape, most, &definitions, values).map_err(|what| wrong(what.into()))?;
                    let row = Row { group: self.group, row: self.row, texts };
                    (self.open, self.row) = (Some(reader), self.row + 1);
                    return Ok(Some(row));
                }
            }
        }
    }
}

/// The texts of a row: one, or as many as its list has.
fn texts_of(shape: Shape, most: i16, definitions: &[i16], values: Vec<ByteArray>) -> Result<Vec<ByteArray>, &'static str> {
    // A column with nothing optional has no definition levels, so nothing is missing in it.
    let missing = definitions.iter().find(|level| **level < most);
    match (shape, missing) {
        (_, None) => Ok(values),
        (Shape::Text, Some(_)) => Err("it is null, and no text"),
        (Shape::List(present), Some(level)) if *level >= present => Err("its list has a null, and no text"),
        (Shape::List(present), Some(level)) if *level == present - 1 => Ok(values),
        (Shape::List(_), Some(_)) => Err("it is null, and no list of texts"),
    }
}

/// The bytes of a footer, or what is wrong.
fn footer(of: &Bytewise) -> io::Result<Result<Vec<u8>, &'static str>> {
    let end = of.read(of.length.saturating_sub(8), 8)?;
    let Some((length, magic)) = end.split_first_chunk::<4>().filter(|_| end.len() == 8) else {
        return Ok(Err("it is no Parquet file: it is too short"));
    };
    match magic {
        b"PAR1" => {}
        b"PARE" => return Ok(Err("its footer is encrypted, which is not read")),
        _ => return Ok(Err("it is no Parquet file, or not all of one: it does not end as those do")),
    }
    let length = u64::from(u32::from_le_bytes(*length));
    let Some(begin) = (of.length - 8).checked_sub(length) else { return Ok(Err("its footer is damaged: it is longer than the file")) };
    let footer = of.read(begin, length)?;
    Ok(if thrift::footer(&footer) { Ok(footer) } else { Err("its footer is damaged") })
}

/// The number of a column and how it holds texts, or what is wrong.
fn find(schema: &SchemaDescriptor, name: &str) -> Result<(usize, Shape), String> {
    let fields = schema.root_schema().get_fields();
    let Some(field) = fields.iter().find(|f| f.name() == name) else {
        let names: Vec<String> = fields.iter().take(20).map(|f| format!("`{}`", f.name())).collect();
        return Err(format!("it has no column `{name}`: name the one that has the text, of {}", names.join(", ")));
    };
    let leaves: Vec<usize> = (0..schema.num_columns()).filter(|c| schema.get_column_root(*c).name() == name).collect();
    let is_list = field.get_basic_info().converted_type() == ConvertedType::LIST
        || field.get_basic_info().logical_type_ref() == Some(&LogicalType::List)
        || field.get_basic_info().repetition() == Repetition::REPEATED;
    let other = |what: &str| Err(format!("its column `{name}` has {what}; what is read is a text (string or binary), or a list of texts"));
    match leaves[..] {
        [leaf] if is_text(&schema.column(leaf)) => {
            let column = schema.column(leaf);
            let inner = column.self_type().get_basic_info();
            let element = i16::from(column.max_rep_level() == 1 && inner.repetition() == Repetition::OPTIONAL);
            match (field.is_primitive(), column.max_rep_level()) {
                (true, 0) => Ok((leaf, Shape::Text)),
                (_, 1) if is_list && column.path().parts().len() <= 3 => Ok((leaf, Shape::List(column.max_def_level() - element))),
                _ => other("structures"),
            }
        }
        [leaf] => other(&format!("values of the type {}", schema.column(leaf).physical_type())),
        _ => other("structures"),
    }
}

fn is_text(column: &ColumnDescriptor) -> bool {
    let text = match column.logical_type_ref() {
        None => matches!(column.converted_type(), ConvertedType::NONE | ConvertedType::UTF8 | ConvertedType::JSON | ConvertedType::ENUM),
        Some(logical) => matches!(logical, LogicalType::String | LogicalType::Json | LogicalType::Enum),
    };
    text && column.physical_type() == Physical::BYTE_ARRAY
}

/// What the crate `parquet` says, or that it has failed. Files that it does not expect may end it.
fn guarded<T>(work: impl FnOnce() -> Parsed<T>) -> Result<T, String> {
    unwound("the reader of Parquet", work).map_err(|text| {
        let prefixes = ["Parquet error: ", "External: ", "EOF: "];
        prefixes.iter().find_map(|p| text.strip_prefix(p)).unwrap_or(&text).into()
    })
}

#[cfg(test)]
mod tests;
