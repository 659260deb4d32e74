//! The lines of a file that may be long, damaged, or still be written.

use std::io::{self, BufRead, Read};

/// Bytes of a line that is read; longer ones are not mcc's.
const MOST: u64 = 1 << 20;

/// Calls with each line, in order, in the memory of one; `None` is a line that is too long. Empty lines are none.
///
/// # Errors
/// What the file system says.
pub fn each(mut file: impl BufRead, mut line: impl FnMut(Option<&[u8]>)) -> io::Result<()> {
    let mut text = vec![];
    loop {
        text.clear();
        if file.by_ref().take(MOST).read_until(b'\n', &mut text)? == 0 {
            return Ok(());
        }
        if text.last() == Some(&b'\n') || (text.len() as u64) < MOST {
            let text = text.trim_ascii();
            if !text.is_empty() {
                line(Some(text));
            }
        } else {
            file.skip_until(b'\n')?;
            line(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_may_be_cut_or_far_too_long_and_the_next_one_is_read() {
        let text = [b"one\n\n \r\n".as_slice(), &vec![b'x'; 3 << 20], b"\ntwo\r\nthr"].concat();
        let mut seen = vec![];
        each(text.as_slice(), |line| seen.push(line.map(|l| l.to_vec()))).unwrap();
        assert_eq!(seen, [Some(b"one".to_vec()), None, Some(b"two".to_vec()), Some(b"thr".to_vec())]);
    }
}
