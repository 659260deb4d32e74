//! Thrift's compact protocol, as far as it shows that a footer, or a page's header, claims no more than there is.
//!
//! The crate `parquet` reserves memory for what these claim, and only then looks whether it is there.

/// Bytes that are not walked over yet.
pub struct ThriftReader<'a>(pub &'a [u8]);

/// Structures within structures.
const DEEPEST: usize = 64;

/// What a field or an element is.
mod kind {
    pub const I32: u8 = 5;
    pub const LIST: u8 = 9;
    pub const STRUCT: u8 = 12;
}

/// What a page's header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// Bytes of the header itself.
    pub header: usize,
    pub compressed: u64,
    pub uncompressed: u64,
}

/// What a page's header says, if it is whole.
pub fn page(bytes: &[u8]) -> Option<Page> {
    let (mut compressed, mut uncompressed) = (None, None);
    let mut reader = ThriftReader(bytes);
    reader.fields(|reader, id, kind| {
        match (id, kind) {
            (2, kind::I32) => uncompressed = u64::try_from(reader.signed()?).ok(),
            (3, kind::I32) => compressed = u64::try_from(reader.signed()?).ok(),
            _ => reader.skip(kind, DEEPEST)?,
        }
        Some(())
    })?;
    Some(Page { header: bytes.len() - reader.0.len(), compressed: compressed?, uncompressed: uncompressed? })
}

/// Whether a footer's lists are no longer than it is, and its schema is a tree of the nodes that it has.
pub fn footer(bytes: &[u8]) -> bool {
    let mut children = vec![];
    let whole = ThriftReader(bytes).fields(|reader, id, kind| {
        if (id, kind) != (2, kind::LIST) {
            return reader.skip(kind, DEEPEST);
        }
        let (kind, nodes) = reader.list()?;
        for _ in 0..nodes {
            let mut own = 0;
            if kind != kind::STRUCT {
                return None;
            }
            reader.fields(|reader, id, kind| match (id, kind) {
                (5, kind::I32) => reader.signed().map(|n| own = n),
                _ => reader.skip(kind, DEEPEST),
            })?;
            children.push(own);
        }
        Some(())
    });
    whole.is_some() && is_tree(&children)
}

/// Whether nodes with so many children, each before its children, are one tree that is not too deep.
fn is_tree(children: &[i64]) -> bool {
    // Number of children still to come, for each node above the next one.
    let mut above: Vec<i64> = vec![];
    for (at, own) in children.iter().enumerate() {
        while above.last() == Some(&0) {
            above.pop();
        }
        match above.last_mut() {
            Some(left) => *left -= 1,
            None if at > 0 => return false,
            None => {}
        }
        if *own < 0 || *own >= children.len() as i64 || above.len() > DEEPEST {
            return false;
        }
        if *own > 0 {
            above.push(*own);
        }
    }
    above.iter().all(|left| *left == 0)
}

impl ThriftReader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    pub fn bytes(&mut self, count: u64) -> Option<()> {
        self.0 = self.0.get(usize::try_from(count).ok()?..)?;
        Some(())
    }

    pub fn unsigned(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    /// A number of which every other one is below 0.
    pub fn signed(&mut self) -> Option<i64> {
        let value = self.unsigned()?;
        Some((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// Reads the head of a list: the kind of its elements and their number, as each takes a byte at least.
    fn list(&mut self) -> Option<(u8, u64)> {
        let head = self.byte()?;
        let count = if head >> 4 == 15 { self.unsigned()? } else { u64::from(head >> 4) };
        (count <= self.0.len() as u64).then_some((head & 15, count))
    }

    fn fields(&mut self, mut each: impl FnMut(&mut Self, i64, u8) -> Option<()>) -> Option<()> {
        let mut id = 0i64;
        loop {
            let head = self.byte()?;
            if head & 15 == 0 {
                return Some(());
            }
            id = if head >> 4 == 0 { self.signed()? } else { id.wrapping_add((head >> 4).into()) };
            each(self, id, head & 15)?;
        }
    }

    fn element(&mut self, kind: u8, depth: usize) -> Option<()> {
        match kind {
            1 | 2 => self.bytes(1),
            _ => self.skip(kind, depth),
        }
    }

    fn skip(&mut self, kind: u8, depth: usize) -> Option<()> {
        let deeper = depth.checked_sub(1)?;
        match kind {
            // The type of a boolean field holds its value, so no bytes follow.
            1 | 2 => Some(()),
            3 => self.bytes(1),
            4..=6 => self.unsigned().map(drop),
            7 => self.bytes(8),
            8 => self.unsigned().and_then(|count| self.bytes(count)),
            9 | 10 => {
                let (kind, count) = self.list()?;
                (0..count).try_for_each(|_| self.element(kind, deeper))
            }
            11 => {
                let count = self.unsigned()?;
                if count == 0 {
                    return Some(());
                }
                let kinds = self.byte()?;
                (0..count).try_for_each(|_| self.element(kinds >> 4, deeper).and_then(|()| self.element(kinds & 15, deeper)))
            }
            12 => self.fields(|reader, _, kind| reader.skip(kind, deeper)),
            13 => self.bytes(16),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_has_as_many_nodes_as_it_says() {
        assert!(is_tree(&[2, 0, 1, 1, 0]));
        assert!(is_tree(&[0]));
        assert!(!is_tree(&[2, 0]), "one too few");
        assert!(!is_tree(&[1, 0, 0]), "one too many");
        assert!(!is_tree(&[-1]));
        assert!(!is_tree(&[i64::from(i32::MAX), 0]));
        let mut deep = vec![1; 1000];
        deep.push(0);
        assert!(!is_tree(&deep));
    }

    #[test]
    fn a_page_header_is_read_once_it_is_whole() {
        // The header has type 0, 300 bytes that compress to 100, and an unknown field with a list of i64.
        let header = [0x15, 0, 0x15, 0xd8, 4, 0x15, 0xc8, 1, 0x19, 0x26, 2, 4, 0];
        assert_eq!(page(&header), Some(Page { header: 13, compressed: 100, uncompressed: 300 }));
        assert!((0..13).all(|n| page(&header[..n]).is_none()));
        assert_eq!(page(&[0x19, 0xf6, 0xff, 0xff, 0xff, 0xff, 0x7, 0]), None, "a list longer than all");
    }
}
