//! The pages of a column, of which none claims more than its bytes can be.

use super::super::bounds::LONGEST;
use super::thrift::{self, ThriftReader};
use bytes::Bytes;
use parquet::basic::{Compression, Encoding};
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::reader::{ChunkReader, Length};
use parquet::file::serialized_reader::SerializedPageReader;
use std::fs::File;
use std::io::{self, Cursor, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Texts that a row's list has at most, with those of other rows on its pages.
pub const MOST_TEXTS: u64 = 1 << 24;

/// Bytes that a page's header has at most. Some writers put the least and the greatest text of a page there.
const LONGEST_HEADER: usize = 64 << 20;

/// A file whose bytes are read where they are asked for.
pub struct Bytewise {
    pub file: File,
    pub length: u64,
}

impl Bytewise {
    /// Reads this many bytes from a place on, or as many as there are.
    pub fn read(&self, at: u64, count: u64) -> io::Result<Vec<u8>> {
        let count = count.min(self.length.saturating_sub(at));
        let mut bytes = vec![0; usize::try_from(count).map_err(io::Error::other)?];
        self.file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    }
}

/// The bytes of one column.
struct Chunk {
    of: Arc<Bytewise>,
    compression: Compression,
}

impl Length for Chunk {
    fn len(&self) -> u64 {
        self.of.length
    }
}

impl ChunkReader for Chunk {
    type T = Header;

    fn get_read(&self, start: u64) -> Result<Header> {
        Ok(Header { of: self.of.clone(), compression: self.compression, start, bytes: None })
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<Bytes> {
        let bytes = self.of.read(start, length as u64)?;
        if bytes.len() < length {
            return Err(ParquetError::EOF("a page is longer than the file".into()));
        }
        Ok(bytes.into())
    }
}

/// A page's header, which is looked at when its first byte is asked for.
struct Header {
    of: Arc<Bytewise>,
    compression: Compression,
    start: u64,
    bytes: Option<Cursor<Vec<u8>>>,
}

impl Read for Header {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let bytes = match self.bytes.take() {
            Some(bytes) => bytes,
            None => Cursor::new(self.look()?),
        };
        self.bytes.insert(bytes).read(buffer)
    }
}

impl Header {
    fn look(&self) -> io::Result<Vec<u8>> {
        let mut count = 1 << 12;
        loop {
            let mut bytes = self.of.read(self.start, count as u64)?;
            if let Some(page) = thrift::page(&bytes) {
                let most = most(self.compression, page.compressed);
                if page.uncompressed > most {
                    let thrift::Page { compressed, uncompressed, .. } = page;
                    let what = format!("a page of {compressed} bytes claims to be {uncompressed} bytes, and is {most} at most");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                }
                bytes.truncate(page.header);
                return Ok(bytes);
            }
            if bytes.len() < count || count >= LONGEST_HEADER {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the header of a page is damaged"));
            }
            count *= 4;
        }
    }
}

/// What a page can be at most, decompressed: of the way in which it is compressed, and of a page of text.
fn most(compression: Compression, bytes: u64) -> u64 {
    let times = match compression {
        Compression::UNCOMPRESSED => 1,
        // A copy of 64 bytes takes 3 bytes.
        Compression::SNAPPY => 32,
        // One length byte stands for 255 bytes.
        Compression::LZ4 | Compression::LZ4_RAW => 256,
        // A match of 258 bytes takes 2 bits.
        Compression::GZIP(_) => 1032,
        // A block of 128 KiB takes 4 bytes.
        Compression::ZSTD(_) => 1 << 15,
        // A copy of 16 MiB takes a few bytes.
        Compression::BROTLI(_) | Compression::LZO => 1 << 24,
    };
    bytes.saturating_mul(times).saturating_add(64).min(LONGEST)
}

/// Pages, and how many texts they claimed since that was set to 0.
pub struct Pages {
    inner: SerializedPageReader<Chunk>,
    has_dictionary: bool,
    /// Kinds of levels, of repetition and of definition, that a page begins with.
    levels: [bool; 2],
    texts: Arc<AtomicU64>,
}

impl Pages {
    /// # Errors
    /// A column that cannot be decompressed.
    pub fn new(of: Arc<Bytewise>, group: &RowGroupMetaData, column: usize, texts: Arc<AtomicU64>) -> Result<Pages> {
        let about = group.column(column);
        let descr = about.column_descr();
        let levels = [descr.max_rep_level() > 0, descr.max_def_level() > 0];
        let chunk = Chunk { of, compression: about.compression() };
        let inner = SerializedPageReader::new(Arc::new(chunk), about, usize::try_from(group.num_rows())?, None)?;
        Ok(Pages { inner, has_dictionary: false, levels, texts })
    }

    /// Whether a page claims no more than its bytes can be.
    fn check(&mut self, page: &Page) -> std::result::Result<(), &'static str> {
        if let Page::DictionaryPage { num_values, .. } = page {
            self.has_dictionary = true;
            let enough = 4 * u64::from(*num_values) <= page.buffer().len() as u64;
            return if enough { Ok(()) } else { Err("a dictionary claims more texts than it has bytes for") };
        }
        let texts = page.num_values().into();
        let values = self.values(page).ok_or("the levels of a page are damaged")?;
        let [is_list, _] = self.levels;
        if is_list && self.texts.fetch_add(texts, Ordering::Relaxed) + texts > MOST_TEXTS {
            return Err("a row's list, with others on its pages, has more than 16,777,216 texts");
        }
        let lengths = match page.encoding() {
            Encoding::PLAIN => return Ok(()),
            Encoding::PLAIN_DICTIONARY | Encoding::RLE_DICTIONARY if self.has_dictionary => return Ok(()),
            Encoding::PLAIN_DICTIONARY | Encoding::RLE_DICTIONARY => return Err("a page needs a dictionary, and there is none before it"),
            Encoding::DELTA_LENGTH_BYTE_ARRAY => delta(values, texts),
            Encoding::DELTA_BYTE_ARRAY => delta(values, texts).and_then(|end| delta(values.get(end..)?, texts)),
            _ => return Err("a page has no encoding of texts"),
        };
        lengths.map(|_| ()).ok_or("the lengths of a page's texts are damaged, or more than 16,777,216")
    }

    /// The bytes behind a page's levels, which are looked at, too.
    fn values<'a>(&self, page: &'a Page) -> Option<&'a [u8]> {
        match page {
            Page::DataPage { buf, rep_level_encoding, def_level_encoding, .. } => {
                let encodings = [*rep_level_encoding, *def_level_encoding];
                let kinds = self.levels.into_iter().zip(encodings).filter(|(has, _)| *has);
                kinds.into_iter().try_fold(buf.as_ref(), |rest, (_, encoding)| {
                    let (length, after) = rest.split_first_chunk().filter(|_| encoding == Encoding::RLE)?;
                    after.get(u32::from_le_bytes(*length) as usize..)
                })
            }
            Page::DataPageV2 { buf, num_values, num_nulls, def_levels_byte_len, rep_levels_byte_len, .. } => {
                let levels = (*def_levels_byte_len as usize).checked_add(*rep_levels_byte_len as usize)?;
                buf.get(levels..).filter(|_| num_nulls <= num_values)
            }
            Page::DictionaryPage { buf, .. } => Some(buf),
        }
    }
}

/// Where numbers end that are packed as differences, if there are no more than a page has texts.
fn delta(bytes: &[u8], texts: u64) -> Option<usize> {
    let mut reader = ThriftReader(bytes);
    let (block, minis, count) = (reader.unsigned()?, reader.unsigned()?, reader.unsigned()?);
    reader.signed()?;
    let numbers = block.checked_div(minis).filter(|n| *n > 0 && count <= texts.min(MOST_TEXTS))?;
    let mut left = count.saturating_sub(1);
    while left > 0 {
        reader.signed()?;
        let widths = reader.0.get(..usize::try_from(minis).ok()?)?;
        reader.bytes(minis)?;
        for width in widths {
            // The last block has no bytes behind the miniblock of its last value.
            if left == 0 {
                break;
            }
            reader.bytes(u64::from(*width).checked_mul(numbers)? / 8)?;
            left = left.saturating_sub(numbers);
        }
    }
    Some(bytes.len() - reader.0.len())
}

impl Iterator for Pages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Result<Page>> {
        self.get_next_page().transpose()
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        let page = self.inner.get_next_page()?;
        page.iter().try_for_each(|page| self.check(page)).map_err(|what| ParquetError::General(what.into()))?;
        Ok(page)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.inner.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.inner.skip_next_page()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parquet::basic::ZstdLevel;

    #[test]
    fn differences_end_where_their_last_number_does() {
        // The header says blocks of 128 values in 4 miniblocks, 3 values, and 5 as the first. In the one block, the
        // first miniblock has one bit a value, and its 4 bytes follow the widths.
        let mut bytes = vec![0x80, 1, 4, 3, 10, 0, 1, 7, 7, 7, 0, 0, 0, 0];
        bytes.extend(b"texts");
        assert_eq!(delta(&bytes, 3), Some(14));
        assert_eq!(delta(&bytes, 2), None, "a page of fewer texts");
        assert_eq!(delta(&bytes[..13], 3), None, "cut off");
        let many = [0x80, 1, 4, 0xff, 0xff, 0xff, 0xff, 0x0f, 10];
        assert_eq!(delta(&many, u64::MAX), None, "more than any page has");
        assert_eq!(delta(&[0x80, 1, 0, 3, 10], 3), None, "blocks of no pieces");
    }

    #[test]
    fn a_page_is_what_its_compression_can_make_of_it() {
        let bytes = 1000;
        assert_eq!(most(Compression::UNCOMPRESSED, bytes), 1064);
        assert_eq!(most(Compression::SNAPPY, bytes), 32_064);
        assert_eq!(most(Compression::ZSTD(ZstdLevel::default()), bytes), 32_768_064);
        assert_eq!(most(Compression::SNAPPY, LONGEST), LONGEST);
    }

    #[test]
    fn pages_compressed_as_far_as_can_be_are_read() {
        // Each codec compresses a text of one repeated letter as far as it can.
        use parquet::column::writer::ColumnWriter;
        use parquet::data_type::ByteArray;
        use parquet::file::properties::WriterProperties;
        use parquet::file::writer::SerializedFileWriter;
        use parquet::schema::parser::parse_message_type;
        let folder = tempfile::tempdir().expect("a folder");
        let kinds = [
            Compression::ZSTD(ZstdLevel::try_new(19).expect("a level")),
            Compression::SNAPPY,
            Compression::LZ4_RAW,
            Compression::GZIP(parquet::basic::GzipLevel::try_new(9).expect("a level")),
            Compression::BROTLI(parquet::basic::BrotliLevel::try_new(9).expect("a level")),
        ];
        for kind in kinds {
            let path = folder.path().join("x.parquet");
            let schema = Arc::new(parse_message_type("message m { required binary text; }").expect("a schema"));
            let how = Arc::new(WriterProperties::builder().set_compression(kind).set_dictionary_enabled(false).build());
            let mut writer = SerializedFileWriter::new(File::create(&path).expect("a file"), schema, how).expect("a writer");
            let mut group = writer.next_row_group().expect("a row group");
            let mut column = group.next_column().expect("a column").expect("one");
            let ColumnWriter::ByteArrayColumnWriter(texts) = column.untyped() else { panic!("texts") };
            texts.write_batch(&[ByteArray::from(vec![b'a'; 8 << 20])], None, None).expect("written");
            column.close().expect("closed");
            group.close().expect("closed");
            writer.close().expect("closed");
            let mut table = super::super::Table::open(&path, "text", (0, 0)).expect("a table");
            let row = table.row().unwrap_or_else(|e| panic!("{kind}: {e}")).expect("a row");
            assert_eq!(row.texts[0].len(), 8 << 20, "{kind}");
        }
    }
}
