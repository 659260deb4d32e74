//! TensorBoard's event files: records of TensorFlow's framing (length and its masked CRC, bytes and theirs),
//! each an `Event` of tensorflow/core/util/event.proto, of which only the fields that are written are here.

use super::clock::now;
use prost::Message;
use runtime::launch::{StepMetrics, host};
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

#[derive(Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "RecordKind", tags = "3, 5, 7")]
    what: Option<RecordKind>,
}

#[derive(prost::Oneof)]
enum RecordKind {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

#[derive(Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    value: Vec<SummaryValue>,
}

#[derive(Message)]
struct SummaryValue {
    #[prost(string, tag = "1")]
    tag: String,
    /// Written even if it is zero.
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

#[derive(Message)]
struct SessionLog {
    /// 1 is the start: what other files have from this step on is no more shown.
    #[prost(int32, tag = "1")]
    status: i32,
}

/// An event file of a run.
pub struct TensorBoard {
    file: File,
    /// The last step that was written.
    last: u64,
}

impl TensorBoard {
    /// A new file in a directory, of a run whose first step is this one.
    pub fn create(dir: &Path, first: u64) -> io::Result<TensorBoard> {
        // TensorBoard reads files in the order of their names, in which host and process follow the time.
        let name = format!("events.out.tfevents.{:010}.{}.{}.0", now() as u64, host(), std::process::id());
        let mut board = TensorBoard { file: File::create_new(dir.join(name))?, last: 0 };
        board.write(0, RecordKind::FileVersion("brain.Event:2".into()))?;
        board.start(first)?;
        Ok(board)
    }

    fn start(&mut self, step: u64) -> io::Result<()> {
        self.write(step, RecordKind::SessionLog(SessionLog { status: 1 }))
    }

    /// The numbers of a step; of one that is done again, after a restart, those of before are no more shown.
    pub fn step(&mut self, p: &StepMetrics) -> io::Result<()> {
        if p.step <= self.last {
            self.start(p.step)?;
        }
        self.last = p.step;
        let numbers = [
            ("loss", p.loss),
            ("grad_norm", p.grad_norm),
            ("lr", Some(p.lr)),
            ("valid_loss", p.valid_loss),
            ("loss_scale", p.loss_scale),
            ("moe_further_passes", p.further_passes),
            ("speed/tokens_per_s", Some(p.tokens_per_s)),
            ("speed/step_ms", Some(p.step_ms)),
            ("speed/data_wait_ms", Some(p.data_wait_ms)),
            ("speed/mfu", p.mfu),
            ("memory_bytes", Some(p.memory_bytes as f64)),
        ];
        let own = numbers.into_iter().filter_map(|(tag, x)| Some((tag.to_owned(), x?)));
        let others = p.reports.iter().map(|(name, x)| (format!("reports/{name}"), *x));
        let held_out = p.valid_losses.iter().map(|(name, x)| (name.clone(), *x));
        let value = own.chain(held_out).chain(others).map(|(tag, x)| SummaryValue { tag, simple_value: Some(x as f32) }).collect();
        self.write(p.step, RecordKind::Summary(Summary { value }))
    }

    fn write(&mut self, step: u64, what: RecordKind) -> io::Result<()> {
        let event = Event { wall_time: now(), step: step as i64, what: Some(what) }.encode_to_vec();
        let length = (event.len() as u64).to_le_bytes();
        // One write holds the whole record, as a reader may look at any time.
        self.file.write_all(&[&length[..], &masked(&length), &event, &masked(&event)].concat())
    }
}

/// A CRC-32C as records have it: turned, so that CRCs of CRCs are none.
fn masked(bytes: &[u8]) -> [u8; 4] {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first record of a file that TensorFlow writes at second 0.
    #[test]
    fn records_are_framed_as_tensorflow_frames_them() {
        assert_eq!(masked(&24u64.to_le_bytes()), [0xa3, 0x7f, 0x4b, 0x22]);
        let event = Event { wall_time: 1.0, step: 3, what: Some(RecordKind::FileVersion("brain.Event:2".into())) };
        let bytes = [b"\x09\x00\x00\x00\x00\x00\x00\xf0\x3f\x10\x03\x1a\x0d", &b"brain.Event:2"[..]].concat();
        assert_eq!(event.encode_to_vec(), bytes);
        assert_eq!(SummaryValue { tag: "a".into(), simple_value: Some(0.0) }.encode_to_vec(), b"\x0a\x01a\x15\0\0\0\0");
    }
}
