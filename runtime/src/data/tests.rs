use super::*;
use ir::dim::Order;
use ir::op::Real;
use ir::program::Extent;
use std::fs;
use std::path::Path;

fn dims(list: &[u64]) -> Vec<Extent> {
    list.iter().map(|n| Extent { name: "d".into(), size: *n, padded: *n, order: Order::Plain }).collect()
}

/// `tokens` and `targets`, `[2, 3]`, and a constant.
fn job(limit: u64) -> Job {
    let mut job = crate::fixture::job(&crate::fixture::Split { microbatches: 1, pp: 1, dp: 1, tp: 1 });
    let entry = |name: &str, default| InputEntry { name: name.into(), dtype: DType::I32, dims: dims(&[2, 3]), default, limit: Some(limit) };
    job.inputs = vec![entry("tokens", None), entry("targets", Some(Feed::Next(0))), entry("ones", Some(Feed::Const(Real(1.0))))];
    job
}

fn npy(path: &Path, descr: &str, shape: &str, data: &[u8]) {
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    while (header.len() + 11) % 64 != 0 {
        header.push(' ');
    }
    header.push('\n');
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.bytes());
    bytes.extend(data);
    fs::write(path, bytes).unwrap();
}

fn int32(values: impl IntoIterator<Item = i32>) -> Vec<u8> {
    values.into_iter().flat_map(i32::to_le_bytes).collect()
}

fn open(job: &Job, file: &Path) -> Result<Data, String> {
    Data::open(job, &[Spec { input: None, file: file.into() }]).map_err(|e| e.to_string())
}

#[test]
fn text_is_windows_of_bytes_that_begin_again() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text");
    fs::write(&file, "abcdefghijk").unwrap();
    let data = open(&job(256), &file).unwrap();
    let step = data.batch(0).unwrap();
    assert_eq!(step[0].data, b"abcdef".map(f64::from));
    assert_eq!(step[1].data, b"bcdefg".map(f64::from));
    assert_eq!(step[2].data, [1.0; 6]);
    // Three sequences: the second batch takes the third and begins again.
    assert_eq!(data.batch(1).unwrap()[0].data, b"ghiabc".map(f64::from));
    assert_eq!((data.batches(), data.end()), (1, None));
}

#[test]
fn llmc_files_are_16_bit_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens.bin");
    let mut bytes = [20_240_520u32, 1, 7].map(u32::to_le_bytes).concat();
    bytes.resize(1024, 0);
    bytes.extend([500u16, 1, 2, 3, 4, 5, 6].map(u16::to_le_bytes).concat());
    fs::write(&file, &bytes).unwrap();
    assert_eq!(open(&job(1000), &file).unwrap().batch(0).unwrap()[1].data, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    bytes[4] = 2;
    fs::write(&file, &bytes).unwrap();
    assert!(open(&job(1000), &file).err().unwrap().contains("its llm.c version is 2"));
}

#[test]
fn arrays_are_consumed_in_order_and_end() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens.npy");
    npy(&file, "<i4", "(2, 2, 4)", &int32(0..16));
    let data = open(&job(100), &file).unwrap();
    assert_eq!(data.end(), Some(2));
    let step = data.batch(1).unwrap();
    assert_eq!(step[0].data, [8.0, 9.0, 10.0, 12.0, 13.0, 14.0]);
    assert_eq!(step[1].data, [9.0, 10.0, 11.0, 13.0, 14.0, 15.0]);
    assert!(data.batch(2).unwrap_err().to_string().contains("has 2 steps; step 3 was asked for"));
}

#[test]
fn a_token_out_of_range_is_named_with_its_position() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens.npy");
    npy(&file, "<i4", "(2, 2, 4)", &int32((0..16).map(|k| if k == 13 { 99 } else { k })));
    let error = open(&job(50), &file).unwrap().batch(1).unwrap_err().to_string();
    assert!(error.ends_with("tokens.npy`: element 13 is 99, but `tokens` takes 0 to 49"), "{error}");
    // The last element of a line is a target only.
    npy(&file, "<i4", "(2, 2, 4)", &int32((0..16).map(|k| if k == 15 { -1 } else { k })));
    let error = open(&job(50), &file).unwrap().batch(1).unwrap_err().to_string();
    assert!(error.ends_with("element 15 is -1, but `targets` takes 0 to 49"), "{error}");
    let text = dir.path().join("text");
    fs::write(&text, "abcdefg\u{ff}").unwrap();
    let error = open(&job(104), &text).unwrap().batch(0).map(|_| ()).map_err(|e| e.to_string());
    assert_eq!(error, Ok(()));
    fs::write(&text, "abcdez\u{ff}").unwrap();
    let error = open(&job(104), &text).unwrap().batch(0).unwrap_err().to_string();
    assert!(error.ends_with("element 5 is 122, but `tokens` takes 0 to 103"), "{error}");
}

#[test]
fn inputs_are_fed_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a.npy"), dir.path().join("b.npy"));
    npy(&a, "<i8", "(1, 2, 3)", &(0..6i64).flat_map(i64::to_le_bytes).collect::<Vec<_>>());
    npy(&b, "|u1", "(1, 2, 3)", &[9, 8, 7, 6, 5, 4]);
    let spec = |text: &str, file: &Path| Spec::parse(&format!("{text}{}", file.display()));
    let data = Data::open(&job(100), &[spec("tokens=", &a), spec("targets=", &b)]).unwrap();
    assert_eq!(data.batch(0).unwrap()[1].data, [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]);
    let error = |specs: &[Spec]| Data::open(&job(100), specs).err().unwrap().to_string();
    assert!(error(&[spec("tokens=", &a)]).contains("its shape is [1, 2, 3], `tokens` takes [steps, 2, 4]"));
    assert!(error(&[spec("token=", &a)]).contains("the model has no input `token`; its inputs are tokens, targets, ones"));
    assert!(error(&[spec("tokens=", &a), spec("", &b)]).contains("input `tokens` is fed twice"));
    assert!(error(&[]).contains("no data for input `tokens`: pass --data FILE"));
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.npy");
    let refused = || open(&job(100), &file).err().unwrap();
    npy(&file, "<i4", "(2, 2, 4)", &int32(0..15));
    assert!(refused().contains("it ends early: 60 bytes of data instead of 64"));
    npy(&file, "<f4", "(2, 2, 4)", &int32(0..16));
    assert!(refused().contains("it holds floats, `tokens` takes i32"));
    npy(&file, "<c8", "(2, 2, 4)", &int32(0..16));
    assert!(refused().contains("its elements are"));
    fs::write(&file, b"\x93NUMPY\x01\x00garbage").unwrap();
    assert!(refused().contains("no readable .npy file"));
    fs::write(&file, "abc").unwrap();
    assert!(refused().contains("it has 3 tokens, fewer than one sequence of 3 and the token after it"));
    fs::write(&file, "").unwrap();
    assert!(refused().contains("it is empty"));
    assert!(open(&job(100), dir.path()).err().unwrap().contains("it is not a file"));
}

#[test]
fn derived_inputs_follow_their_definitions() {
    let line = [5.0, 0.0, 7.0, 8.0, 0.0, 1.0];
    assert_eq!(previous(&line, 9.0), [9.0, 5.0, 0.0, 7.0, 8.0, 0.0]);
    assert_eq!(documents(&line, 0.0), [0.0, 0.0, 1.0, 1.0, 1.0, 2.0]);
    assert_eq!(positions(&line, 0.0), [0.0, 1.0, 0.0, 1.0, 2.0, 0.0]);
}
