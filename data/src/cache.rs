//! Orders and blends kept in files, so that they are built once.
//!
//! | bytes of `KEY.order` or `KEY.blend` | hold |
//! |---|---|
//! | 8 | `mccorder` |
//! | 8 | the version, 1 |
//! | 32 | the key: the BLAKE3 hash of all that the content follows from |
//! | 24 | how many numbers each of three rows has |
//! | 4 each | the rows: documents, samples and shuffle of an order, or those of a blend or of packed documents |
//! | 32 | the hash of all before: BLAKE3 of the hashes of pieces of 16 MiB |
//!
//! A file that is anything else is replaced.

use crate::cores;
use crate::map::{Map, Numbers, number};
use crate::order::{ExtraToken, Layout, Overlong, Remainder, Rule};
use blake3::{Hash, Hasher};
use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

const MAGIC: [u8; 8] = *b"mccorder";
const VERSION: u64 = 1;
const HEADER: usize = 72;
const PIECE: usize = 16 << 20;

/// Three rows of numbers, of which an order or a blend is made.
pub type Rows = [Numbers; 3];

/// Key of an order in a cache: it follows from the layout of samples, the rule, and the lengths of the documents.
pub fn key(layout: Layout, rule: &Rule, lengths: &[u8]) -> Hash {
    // Every field of the rule enters the key, so that orders by different rules have different keys.
    let Rule { sequence_length, extra, rest, seed, samples, documents } = rule;
    let extra = match extra {
        ExtraToken::Included => 1,
        ExtraToken::Omitted => 0,
    };
    let rest = match rest {
        Remainder::Dropped => 0,
        Remainder::Kept => 1,
    };
    let mut hasher = Hasher::new();
    hasher.update(match layout {
        Layout::Stream => &b"an order of samples, as megatron-core 0.16"[..],
        Layout::Packed(Overlong::Cut) => b"rows of whole documents, packed by first fit 1",
        Layout::Packed(Overlong::Split) => b"rows of documents and pieces of long ones, packed by first fit 1",
    });
    let (asked, samples) = (u64::from(samples.is_some()), samples.unwrap_or(0));
    for number in [u64::from(*sequence_length), extra, rest, u64::from(*seed), asked, samples, documents.start, documents.end] {
        hasher.update(&number.to_le_bytes());
    }
    let bytes = |document: u64| usize::try_from(document).unwrap_or(usize::MAX).saturating_mul(4).min(lengths.len());
    hasher.update(pieces(lengths.get(bytes(documents.start)..bytes(documents.end)).unwrap_or_default()).as_bytes());
    hasher.finalize()
}

/// The hash of the hashes of pieces, which all cores make.
fn pieces(bytes: &[u8]) -> Hash {
    let hashes = cores::queue(bytes.chunks(PIECE).collect(), |piece: &[u8]| blake3::hash(piece));
    let mut all = Hasher::new();
    for hash in hashes {
        all.update(hash.as_bytes());
    }
    all.finalize()
}

/// Writes rows as a file that is whole or not there. All cores write and hash pieces.
pub fn write(file: &Path, key: &Hash, rows: &Rows) -> io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let part = tempfile::Builder::new().prefix(".order-").tempfile_in(folder)?;
    let mut header = [&MAGIC[..], &VERSION.to_le_bytes(), key.as_bytes()].concat();
    rows.iter().for_each(|row| header.extend(row.len().to_le_bytes()));
    let header = Numbers::Memory(header.as_chunks().0.iter().map(|n| u32::from_le_bytes(*n)).collect());
    let content = [&header, &rows[0], &rows[1], &rows[2]];
    let numbers: u64 = content.iter().map(|row| row.len()).sum();
    let each = PIECE as u64 / 4;
    let pieces = (0..numbers.div_ceil(each)).map(|n| n * each..numbers.min((n + 1) * each)).collect();
    let hashes = cores::queue(pieces, |piece: Range<u64>| {
        let begin = 4 * piece.start;
        let bytes = bytes(&content, piece);
        part.as_file().write_all_at(&bytes, begin).map(|()| blake3::hash(&bytes))
    });
    let mut all = Hasher::new();
    for hash in hashes {
        all.update(hash?.as_bytes());
    }
    part.as_file().write_all_at(all.finalize().as_bytes(), 4 * numbers)?;
    // Nothing waits for the disk here: a file that a crash damaged does not match its hash. Its mode lets everybody
    // who reads the data set use the order.
    fs::set_permissions(part.path(), std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
    part.persist(file)?;
    Ok(())
}

/// Some numbers of rows, which follow each other, as a file has them.
fn bytes(rows: &[&Numbers], wanted: Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0; 4 * (wanted.end - wanted.start) as usize];
    let (mut rest, mut begin) = (bytes.as_chunks_mut::<4>().0, 0);
    for row in rows {
        let end = begin + row.len();
        let own = wanted.start.clamp(begin, end) - begin..wanted.end.clamp(begin, end) - begin;
        let (out, after) = rest.split_at_mut((own.end - own.start) as usize);
        match row {
            Numbers::Memory(numbers) => {
                let numbers = &numbers[own.start as usize..own.end as usize];
                out.iter_mut().zip(numbers).for_each(|(out, number)| *out = number.to_le_bytes());
            }
            Numbers::File(..) => out.iter_mut().zip(own).for_each(|(out, n)| *out = row.get(n).unwrap_or(0).to_le_bytes()),
        }
        (rest, begin) = (after, end);
    }
    bytes
}

/// The rows that a file of a cache has, or why there are none.
pub enum CachedRows {
    Rows(Rows),
    Missing,
    /// Why it is not used.
    Damaged(String),
}

/// Reads rows, all of whose bytes are looked at.
pub fn read(file: &Path, key: &Hash) -> io::Result<CachedRows> {
    let map = match Map::open(file) {
        Ok(map) => Arc::new(map),
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(CachedRows::Missing),
        Err(e) => return Err(e),
    };
    let damaged = |what: &str| Ok(CachedRows::Damaged(what.into()));
    let Some((content, hash)) = map.split_last_chunk::<32>() else { return damaged("it is too short") };
    if content.len() < HEADER || !content.starts_with(&MAGIC) {
        return damaged("it is no order of samples and no blend");
    }
    if number(content, 1) != Some(VERSION.to_le_bytes()) {
        return damaged("it is of another version");
    }
    if content[16..48] != *key.as_bytes() {
        return damaged("it is of other data");
    }
    let mut rows = vec![];
    let mut begin = HEADER;
    for row in 6..9 {
        let count = number(content, row).map_or(u64::MAX, u64::from_le_bytes);
        let bytes = usize::try_from(count).ok().and_then(|n| n.checked_mul(4)).and_then(|n| begin.checked_add(n));
        let Some(end) = bytes.filter(|end| *end <= content.len()) else { return damaged("its indices are longer than it is") };
        rows.push(begin..end);
        begin = end;
    }
    if begin != content.len() {
        return damaged("its indices are not as long as it says");
    }
    if *pieces(content).as_bytes() != *hash {
        return damaged("its hash is not that of its content");
    }
    Ok(CachedRows::Rows([0, 1, 2].map(|k| Numbers::File(map.clone(), rows[k].clone()))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::{Layout, Order};
    use crate::random::RandomState;

    fn order(seed: u32) -> (Rule, Vec<u8>, Order) {
        let rule = Rule { sequence_length: 4, extra: ExtraToken::Included, rest: Remainder::Dropped, seed, samples: Some(50), documents: 0..9 };
        let lengths: Vec<u8> = (1..10i32).flat_map(|l| (l * 3).to_le_bytes()).collect();
        let order = Order::build(&rule, &lengths).expect("an order");
        (rule, lengths, order)
    }

    #[test]
    fn an_order_is_read_as_it_was_written_and_damage_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("new/x.order");
        let (rule, lengths, order) = order(3);
        let key = key(Layout::Stream, &rule, &lengths);
        assert!(matches!(read(&file, &key), Ok(CachedRows::Missing)));
        write(&file, &key, &order.rows).expect("written");
        let all = |o: &Order| [o.documents().collect::<Vec<_>>(), o.samples().collect(), o.shuffle().collect()];
        match read(&file, &key) {
            Ok(CachedRows::Rows(rows)) => assert_eq!(all(&Order::of(rows).expect("an order")), all(&order)),
            _ => panic!("it is whole"),
        }
        let whole = fs::read(&file).expect("a file");
        let mut random = RandomState::new(1);
        for _ in 0..2000 {
            let mut bytes = whole.clone();
            let at = random.interval(bytes.len() as u32 - 1) as usize;
            match random.interval(2) {
                0 => bytes.truncate(at),
                1 => bytes[at] ^= 1 << random.interval(7),
                _ => bytes.insert(at, 0xff),
            }
            fs::remove_file(&file).and_then(|()| fs::write(&file, bytes)).expect("written");
            assert!(matches!(read(&file, &key), Ok(CachedRows::Damaged(_))));
        }
    }

    #[test]
    fn pieces_of_rows_are_their_bytes_wherever_they_are_cut() {
        let rows = [vec![1, 2, 3], vec![], vec![4], vec![5, 6, 7, 8]].map(Numbers::Memory);
        let rows: Vec<&Numbers> = rows.iter().collect();
        let whole: Vec<u8> = (1..=8u32).flat_map(u32::to_le_bytes).collect();
        for begin in 0..=8 {
            for end in begin..=8 {
                assert_eq!(bytes(&rows, begin..end), whole[4 * begin as usize..4 * end as usize]);
            }
        }
    }

    #[test]
    fn keys_differ_where_orders_do() {
        let (rule, mut lengths, _) = order(3);
        let first = key(Layout::Stream, &rule, &lengths);
        let others = [
            Rule { seed: 4, ..rule.clone() },
            Rule { samples: None, ..rule.clone() },
            Rule { extra: ExtraToken::Omitted, ..rule.clone() },
            Rule { rest: Remainder::Kept, ..rule.clone() },
            Rule { documents: 0..8, ..rule.clone() },
        ];
        let [cut, split] = [Overlong::Cut, Overlong::Split].map(|long| key(Layout::Packed(long), &rule, &lengths));
        assert!(cut != first && split != first && cut != split);
        assert!(others.iter().all(|r| key(Layout::Stream, r, &lengths) != first));
        lengths[0] += 1;
        assert_ne!(key(Layout::Stream, &rule, &lengths), first);
    }
}
