use super::*;
use ir::dim::Order;
use ir::op::{DType, Real};
use ir::program::{Extent, Interval};
use std::fs;
use std::path::Path;

fn dims(list: &[u64]) -> Vec<Extent> {
    list.iter().map(|n| Extent { name: "d".into(), size: *n, padded: *n, order: Order::Plain }).collect()
}

fn upto(limit: i32) -> Interval {
    Interval { least: 0, most: limit - 1 }
}

/// `tokens` and `targets`, `[2, 3]`, and a constant.
fn job(limit: i32) -> Job {
    let mut job = crate::fixture::job(&crate::fixture::Split { microbatches: 1, pp: 1, dp: 1, tp: 1 });
    let entry =
        |name: &str, default| InputEntry { name: name.into(), dtype: DType::I32, dims: dims(&[2, 3]), default, takes: Some(vec![upto(limit)]) };
    job.inputs = vec![entry("tokens", None), entry("targets", Some(InputDefault::Next(0))), entry("ones", Some(InputDefault::Const(Real(1.0))))];
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
    Data::open(job, &[Spec::parse(&file.display().to_string(), Encoding::Text)]).map_err(|e| e.to_string())
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
    // The text has three sequences: the second batch takes the third and begins again.
    assert_eq!(data.batch(1).unwrap()[0].data, b"ghiabc".map(f64::from));
    assert_eq!((data.batches(), data.end()), (1, None));
}

#[test]
fn what_comes_further_on_ends_with_the_window() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text");
    fs::write(&file, "abcdefghijk").unwrap();
    let mut job = job(256);
    let ahead = |from, takes: &[i32]| InputEntry {
        name: format!("ahead of {from}"),
        dtype: DType::I32,
        dims: dims(&[2, 2, 3]),
        default: Some(InputDefault::Ahead(from)),
        takes: Some(takes.iter().map(|least| Interval { least: *least, most: 255 }).collect()),
    };
    job.inputs.extend([ahead(0, &[-100]), ahead(1, &[-100])]);
    let step = open(&job, &file).unwrap().batch(0).unwrap();
    let [b, c, d, e, f, g] = b"bcdefg".map(f64::from);
    let none = -100.0;
    assert_eq!(step[3].data, [b, c, none, c, none, none, e, f, none, f, none, none]);
    assert_eq!(step[4].data, [c, d, none, d, none, none, f, g, none, g, none, none]);
    // Past the window stands -100, which the input has to take.
    job.inputs[4] = ahead(1, &[0]);
    assert!(open(&job, &file).unwrap().batch(0).unwrap_err().to_string().contains("-100"));
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
}

#[test]
fn tokens_of_32_bits_stream_as_those_of_16_do() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens.bin");
    let tokens = [128_000u32, 1, 2, 3, 4, 5, 6];
    let (words, shorts) = (tokens.map(u32::to_le_bytes).concat(), tokens.map(|t| (t as u16).to_le_bytes()).concat());
    let mut llama = [20_240_801u32, 7, 7].map(u32::to_le_bytes).concat();
    llama.resize(1024, 0);
    for (bytes, encoding, first) in [
        ([llama, words.clone()].concat(), Encoding::Text, 128_000.0),
        (words.clone(), Encoding::U32, 128_000.0),
        (words, Encoding::I32, 128_000.0),
        (shorts, Encoding::U16, f64::from(128_000u32 as u16)),
    ] {
        fs::write(&file, bytes).unwrap();
        let data = Data::open(&job(128_001), &[Spec::parse(&file.display().to_string(), encoding)]).unwrap();
        let step = data.batch(0).unwrap();
        assert_eq!((step[0].data[0], &step[1].data[..]), (first, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0][..]), "{encoding:?}");
    }
    npy(
        &dir.path().join("x.npy"),
        "<u4",
        "(1, 2, 4)",
        &[[7u32; 7].as_slice(), &[4_000_000_000]].concat().iter().flat_map(|t| t.to_le_bytes()).collect::<Vec<_>>(),
    );
    let error = open(&job(9), &dir.path().join("x.npy")).unwrap().batch(0).unwrap_err().to_string();
    assert!(error.ends_with("element 7 is 4000000000, but `targets` takes 0 to 8"), "{error}");
}

/// Opens files as a run does, with the user's word for what they hold.
fn checked(job: &Job, files: &[&Path], encoding: Encoding) -> Result<(), String> {
    let specs: Vec<Spec> = files.iter().map(|f| Spec::parse(&f.display().to_string(), encoding)).collect();
    open_checked(job, Some(&specs), None).map(|_| ()).map_err(|e| e.to_string())
}

/// Each kind of file that is often at hand, by its first bytes.
#[test]
fn files_of_other_kinds_are_refused_with_what_to_do_instead() {
    let dir = tempfile::tempdir().unwrap();
    let words = |list: &[u32], n: usize| {
        let mut bytes = list.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
        bytes.resize(n, 0);
        bytes
    };
    let index = |code: u8| [b"MMIDIDX\0\0".as_slice(), &1u64.to_le_bytes(), &[code], &[0; 16]].concat();
    let shorts = || (0..40u16).flat_map(|t| (t * 611).to_le_bytes()).collect::<Vec<u8>>();
    let long = |start: &[u8]| [start, &[0xff, 0, 7, 1]].concat().repeat(9);
    let json = |lines: usize| "{\"text\": \"to be\", \"n\": [1, null]}\n".repeat(lines).into_bytes();
    for (name, bytes, want) in [
        ("gpt2.bin", words(&[20_240_520, 2, 9], 1042), "its llm.c version is 2; of files that begin with 20240520, only 1 (16-bit tokens) is known"),
        ("llama.bin", words(&[20_240_801, 1, 9], 1060), "its llm.c version is 1; of files that begin with 20240801, only 7 (32-bit tokens) is known"),
        ("cut.bin", words(&[20_240_520, 1, 10], 1042), "it says 10 tokens, but has 9; it was cut or joined"),
        ("joined.bin", words(&[20_240_520, 1, 8], 1042), "it says 8 tokens, but has 9; it was cut or joined"),
        ("head.bin", words(&[20_240_520, 1, 8], 500), "ends within the header"),
        ("hellaswag.bin", words(&[20_240_522, 1, 8], 2000), "llm.c's evaluation data"),
        ("model.bin", words(&[20_240_326, 3], 2000), "a checkpoint of llm.c's"),
        ("train.bin", shorts(), "as nanoGPT writes them, pass --data-dtype uint16"),
        ("corpus.idx", index(8), "--data NAME.bin --data-dtype uint16 reads them"),
        ("corpus.bin", shorts(), "it is the tokens of a Megatron data set: --data NAME.bin --data-dtype uint16"),
        ("wide.idx", index(4), "--data NAME.bin --data-dtype int32 reads them"),
        ("wide.bin", words(&[7, 8], 64), "--data NAME.bin --data-dtype int32 reads them"),
        (
            "long.idx",
            index(5),
            "`numpy.fromfile(\"NAME.bin\", \"int64\").astype(\"int32\").tofile(\"tokens.bin\")` writes them for --data-dtype int32",
        ),
        ("odd.idx", index(6), "its index says that they are no whole numbers"),
        (
            "w.safetensors",
            [&20u64.to_le_bytes()[..], b"{\"w\":{\"dtype\":\"F32\"}}", &[0; 40]].concat(),
            "it is safetensors, weights and no data: --init reads such",
        ),
        ("x.npz", long(b"PK\x03\x04\x14\0\0\0tokens.npy"), "it is an .npz, several arrays: `numpy.load(\"x.npz\")[NAME]"),
        ("x.pt", long(b"PK\x03\x04\0\0archive/data.pkl"), "it is a file of PyTorch's"),
        ("x.zip", long(b"PK\x03\x04\0\0a.txt"), "it is a zip archive"),
        ("old.pt", long(b"\x80\x02\x8a\nl\xfc"), "it is a pickle, as of PyTorch"),
        ("x.parquet", long(b"PAR1\x15"), "it is Parquet"),
        ("x.feather", long(b"ARROW1\0\0"), "it is Arrow"),
        ("data.arrow", long(b"\xff\xff\xff\xff\x10"), "it is an Arrow stream"),
        ("x.gz", long(b"\x1f\x8b\x08"), "it is compressed with gzip: unpack it (`gunzip`)"),
        ("x.zst", long(b"\x28\xb5\x2f\xfd"), "it is compressed with zstd"),
        (
            "utf16.txt",
            "to be".encode_utf16().flat_map(u16::to_le_bytes).fold(vec![0xff, 0xfe], |mut all, b| {
                all.push(b);
                all
            }),
            "it seems to be UTF-16",
        ),
        ("utf32.txt", ['\u{feff}', 't', 'o'].iter().flat_map(|c| u32::from(*c).to_le_bytes()).collect(), "it seems to be UTF-32: convert"),
        ("big32.txt", ['\u{feff}', 't', 'o'].iter().flat_map(|c| u32::from(*c).to_be_bytes()).collect(), "it seems to be UTF-32: convert"),
        (
            "bare32.txt",
            "to be".chars().flat_map(|c| u32::from(c).to_le_bytes()).collect(),
            "UTF-32LE without its mark: convert it (`iconv -f UTF-32LE",
        ),
        ("big16.txt", "to be, ol\u{e9}".encode_utf16().flat_map(u16::to_be_bytes).collect(), "UTF-16BE without its mark"),
        ("bare16.bin", "to be\r\n\u{201c}or\u{201d}".encode_utf16().flat_map(u16::to_le_bytes).collect(), "UTF-16LE without its mark"),
        ("few.bin", (0..64u16).flat_map(u16::to_le_bytes).collect(), "as nanoGPT writes them, pass --data-dtype uint16"),
        ("x.tar", [&b"a.txt"[..], &[0; 252], b"ustar\x0000", &[0; 249]].concat(), "it is a tar archive: unpack it (`tar xf \"x.tar\"`)"),
        ("x.png", long(b"\x89PNG\r\n\x1a\n"), "it is an image (image/png), and mcc reads those as arrays of floats"),
        ("x.jpg", long(b"\xff\xd8\xff\xe0"), "it is an image (image/jpeg)"),
        ("x.wav", long(b"RIFF\x24\x08\0\0WAVEfmt "), "it is a recording (audio/x-wav)"),
        ("x.rar", long(b"Rar!\x1a\x07\x01\0"), "it is an archive (application/vnd.rar): unpack it"),
        ("x.gguf", long(b"GGUF\x03\0\0\0"), "it is GGUF, weights for llama.cpp and no data"),
        ("x.orc", long(b"ORC"), "pandas.read_orc(\"x.orc\")"),
        ("x.avro", long(b"Obj\x01"), "it is Avro"),
        ("x.mat", long(b"MATLAB 5.0 MAT-file"), "it is of MATLAB"),
        ("x.h5", long(b"\x89HDF\r\n\x1a\n"), "it is HDF5"),
        ("x.db", long(b"SQLite format 3\0"), "it is a database of SQLite"),
        ("x.docx", long(b"PK\x03\x04\0\0word/document.xml"), "it is a document of Word"),
        ("x.epub", long(b"PK\x03\x04\0\0mimetypeapplication/epub+zip"), "it is an EPUB"),
        ("x.pdf", long(b"%PDF-1.7\n%\xe2"), "it is a PDF"),
        ("plain.pdf", b"%PDF-1.4\n1 0 obj\n<< /Type /Catalog >>\n".to_vec(), "it is a PDF: extract its text (`pdftotext`), or pass --bytes"),
        ("x.rtf", b"{\\rtf1\\ansi to be}".to_vec(), "it is RTF"),
        ("train.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n".to_vec(), "`git lfs pull` fetches it"),
        ("x.elf", long(b"\x7fELF\x02\x01\x01"), "it is a program or its data"),
        (
            "latin1.txt",
            b"caf\xe9 au lait, s'il vous pla\xeet".to_vec(),
            "byte 3 (0xe9) is not UTF-8, so its bytes are no tokens: if it is a text, make it UTF-8",
        ),
        ("zero.txt", b"to be\0or not to be".to_vec(), "byte 5 (0x00) is zero"),
        ("cut.txt", "to be or not to b\u{eb}".as_bytes()[..18].to_vec(), "byte 17 (0xc3) begins a character of UTF-8 that the file's end cuts off"),
        ("late.txt", [&b"to be ".repeat(20_000)[..], b"\xff"].concat(), "byte 120000 (0xff) is not UTF-8"),
        ("x.jsonl", json(3), "it is JSON"),
        ("long.jsonl", json(9000), "it is JSON"),
        ("cut.jsonl", json(3)[..70].to_vec(), "it is JSON"),
        ("bad-line.jsonl", [&json(2)[..], b"so be it\n", &json(2)[..]].concat(), "it is JSON"),
        ("nan.jsonl", b"{\"loss\": NaN}\n{\"loss\": 1}\n".to_vec(), "it is JSON"),
        ("bom.json", [b"\xef\xbb\xbf", &json(1)[..]].concat(), "it is JSON"),
        ("comment.jsonl", [b"# data\n", &json(1)[..]].concat(), "it is JSON"),
        ("pretty.json", b"\n [\n  {\"a\": 1},\n  2\n]\n".to_vec(), "it is JSON"),
    ] {
        let file = dir.path().join(name);
        fs::write(&file, bytes).unwrap();
        let error = checked(&job(1 << 30), &[&file], Encoding::Text).unwrap_err();
        assert!(error.contains(name) && error.contains(want), "{name}: {error}");
        // An index of tokens and a file whose header names another format stay refused; all others are bytes if the
        // user says so.
        let header = name.ends_with(".bin") && error.contains("llm.c version") || error.contains("it says") || error.contains("the header");
        assert_eq!(checked(&job(1 << 30), &[&file], Encoding::Bytes).is_err(), header, "{name}");
    }
    for text in ["[1] To be, or not to be", "{ } that is the question", "\"To be\" or", "12 monkeys 1995", "[Chapter 1]\n\nTo be"] {
        let file = dir.path().join("plain.txt");
        fs::write(&file, text).unwrap();
        assert_eq!(checked(&job(256), &[&file], Encoding::Text), Ok(()), "{text}");
    }
}

#[test]
fn the_users_word_for_files_is_refused_where_none_needs_it() {
    let dir = tempfile::tempdir().unwrap();
    let (array, text) = (dir.path().join("x.npy"), dir.path().join("x.txt"));
    npy(&array, "<i4", "(1, 2, 4)", &int32(0..8));
    fs::write(&text, "to be or not").unwrap();
    let error = checked(&job(256), &[&array], Encoding::Bytes).unwrap_err();
    assert!(error.starts_with("--bytes and --data-dtype are for files that do not say what they hold; of `"), "{error}");
    assert_eq!(checked(&job(256), &[&text], Encoding::Bytes), Ok(()));
    fs::write(&text, "odd").unwrap();
    let error = checked(&job(256), &[&text], Encoding::U16).unwrap_err();
    assert!(error.ends_with("its 3 bytes are no whole number of 16-bit tokens"), "{error}");
}

#[test]
fn labels_that_do_not_count_are_those_that_the_text_ignores() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens.npy");
    let mut job = job(256);
    job.inputs[1].takes = Some(vec![Interval { least: -100, most: -100 }, upto(256)]);
    job.inputs.push(InputEntry { name: "before".into(), default: Some(InputDefault::Prev(0, 0)), ..job.inputs[0].clone() });
    job.inputs.push(InputEntry {
        name: "place".into(),
        default: Some(InputDefault::Positions(0, 0)),
        takes: Some(vec![upto(2)]),
        ..job.inputs[0].clone()
    });
    let tokens = |k: usize, x: i32| (0..8).map(move |i| if i == k { x } else { i as i32 % 2 });
    let tried = |list: Vec<i32>| {
        npy(&file, "<i4", "(1, 2, 4)", &int32(list));
        open(&job, &file).unwrap().batch(0).map(|_| ()).map_err(|e| e.to_string().rsplit_once("`: ").unwrap().1.to_string())
    };
    // The last element of a line is only a target.
    assert_eq!(tried(tokens(3, -100).collect()), Ok(()));
    assert_eq!(tried(tokens(3, -1).collect()), Err("element 3 is -1, but `targets` takes -100 or 0 to 255".into()));
    assert_eq!(tried(tokens(7, 9999).collect()), Err("element 7 is 9999, but `targets` takes -100 or 0 to 255".into()));
    assert_eq!(tried(tokens(5, -100).collect()), Err("element 5 is -100, but `tokens` takes 0 to 255".into()));
    assert_eq!(tried(vec![1; 8]), Err("at element 2 `place` is 2, but it takes 0 to 1".into()));
    job.inputs[0].takes = None;
    npy(&file, "<i4", "(1, 2, 4)", &int32(tokens(5, 300)));
    let error = open(&job, &file).unwrap().batch(0).unwrap_err().to_string();
    assert!(error.ends_with("element 5 is 300, but `targets` takes -100 or 0 to 255"), "{error}");
    job.inputs[1].takes = None;
    let error = open(&job, &file).unwrap().batch(0).unwrap_err().to_string();
    assert!(error.ends_with("element 5 is 300, but `before` takes 0 to 255"), "{error}");
}

#[test]
fn a_number_that_the_text_gives_in_place_of_data_is_checked_too() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text");
    fs::write(&file, "to be or not").unwrap();
    let mut job = job(256);
    for default in [InputDefault::Const(Real(256.0)), InputDefault::Prev(0, 256)] {
        job.inputs[2].default = Some(default);
        let error = open(&job, &file).err().unwrap();
        assert_eq!(error, "without a file `ones` holds 256 by the model's text, but it takes 0 to 255: pass --data ones=FILE.npy");
    }
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
    // The last element of a line is only a target.
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
fn a_float_that_is_not_finite_is_named_with_its_position() {
    let dir = tempfile::tempdir().unwrap();
    let [double, single] = ["x.npy", "y.npy"].map(|name| dir.path().join(name));
    let mut job = job(50);
    job.inputs = vec![InputEntry { name: "x".into(), dtype: DType::F32, takes: None, ..job.inputs[0].clone() }];
    job.programs = vec![];
    for (value, want) in [(f64::NAN, "element 8 is NaN"), (f64::INFINITY, "element 8 is inf"), (f64::NEG_INFINITY, "element 8 is -inf")] {
        let data = |k: u64| if k == 8 { value } else { k as f64 };
        npy(&double, "<f8", "(2, 2, 3)", &(0..12).flat_map(|k| data(k).to_le_bytes()).collect::<Vec<_>>());
        npy(&single, "<f4", "(2, 2, 3)", &(0..12).flat_map(|k| (data(k) as f32).to_le_bytes()).collect::<Vec<_>>());
        for data in [open(&job, &double).unwrap(), open(&job, &single).unwrap()] {
            let said = |found: Result<(), DataError>| found.map_err(|e| e.to_string().rsplit_once("`: ").unwrap().1.to_string());
            let want = Err(format!("{want}, and `x` takes finite numbers alone"));
            assert_eq!(said(data.check_steps(0..2)), want);
            assert_eq!(said(data.batch(1).map(drop)), want);
            assert_eq!(said(data.check_steps(0..1)), Ok(()));
        }
    }
}

#[test]
fn a_number_that_its_input_stores_as_infinite_is_named_with_its_position() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("x.npy");
    let mut job = job(50);
    job.programs = vec![];
    let f64s = |x: f64| (0..12).flat_map(|k| if k == 8 { x } else { f64::from(k) }.to_le_bytes()).collect::<Vec<_>>();
    let f32s = |x: f32| (0..12).flat_map(|k| if k == 8 { x } else { k as f32 }.to_le_bytes()).collect::<Vec<_>>();
    for (dtype, descr, data, value) in [
        (DType::F32, "<f8", f64s(1e39), "1e39"),
        (DType::F32, "<f8", f64s(-f64::MAX), "-1.7976931348623157e308"),
        (DType::Bf16, "<f4", f32s(f32::MAX), "3.4028234663852886e38"),
        (DType::F16, "<f4", f32s(65_520.0), "6.552e4"),
        (DType::F16, "<i4", int32((0..12).map(|k| if k == 8 { 70_000 } else { k })), "7e4"),
    ] {
        job.inputs = vec![InputEntry { name: "x".into(), dtype, takes: None, ..job.inputs[0].clone() }];
        npy(&file, descr, "(2, 2, 3)", &data);
        let data = open(&job, &file).unwrap();
        let want = format!("`{}`: element 8 is {value}, beyond the numbers of {}, in which `x` is stored", file.display(), dtype.name());
        assert_eq!(data.check_steps(0..2).unwrap_err().to_string(), want);
        assert_eq!(data.batch(1).unwrap_err().to_string(), want);
        assert!(data.check_steps(0..1).is_ok());
    }
    job.inputs[0].dtype = DType::F32;
    npy(&file, "<f8", "(2, 2, 3)", &f64s(f64::from(f32::MAX)));
    assert!(open(&job, &file).unwrap().check_steps(0..2).is_ok());
}

#[test]
fn all_that_steps_will_read_is_looked_at_before_them() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens.npy");
    let ignores = vec![Interval { least: -100, most: -100 }, upto(50)];
    let mut job = job(50);
    let found = |job: &Job, steps| open(job, &file).unwrap().check_steps(steps).map_err(|e| e.to_string().rsplit_once("`: ").unwrap().1.to_string());
    npy(&file, "<i4", "(4, 2, 4)", &int32((0..32).map(|k| if k == 21 { 50 } else { k })));
    assert_eq!(found(&job, 0..4), Err("element 21 is 50, but `tokens` takes 0 to 49".into()));
    assert_eq!((found(&job, 0..2), found(&job, 3..4)), (Ok(()), Ok(())));
    // Element 23 is only a target.
    npy(&file, "<i8", "(4, 2, 4)", &(0..32i64).flat_map(|k| if k == 23 { -100 } else { k }.to_le_bytes()).collect::<Vec<_>>());
    assert_eq!(found(&job, 0..4), Err("element 23 is -100, but `targets` takes 0 to 49".into()));
    job.inputs[1].takes = Some(ignores);
    assert_eq!(found(&job, 0..4), Ok(()));
    // A stream begins again, and what lies behind its last window is never read.
    let stream = |place: usize, n: u16| {
        let tokens = (0..n).flat_map(|k| if usize::from(k) == place { 900u16 } else { k % 50 }.to_le_bytes()).collect::<Vec<u8>>();
        let text = dir.path().join("tokens.bin");
        fs::write(&text, tokens).unwrap();
        let data = Data::open(&job, &[Spec::parse(&text.display().to_string(), Encoding::U16)]).unwrap();
        data.check_steps(0..1 << 40).map_err(|e| e.to_string().rsplit_once("`: ").unwrap().1.to_string())
    };
    assert_eq!(stream(40_000, 50_000), Err("element 40000 is 900, but `tokens` takes 0 to 49".into()));
    assert_eq!(stream(9, 10), Err("element 9 is 900, but `targets` takes -100 or 0 to 49".into()));
    assert_eq!((stream(11, 12), stream(60_000, 50_000)), (Ok(()), Ok(())));
}

/// A run with another number of sequences a step reads on where the data was.
#[test]
fn data_is_read_on_from_where_other_steps_have_read() {
    let dir = tempfile::tempdir().unwrap();
    let (text, array) = (dir.path().join("text"), dir.path().join("x.npy"));
    fs::write(&text, "abcdefghijklmnopqrstuvwxyz").unwrap();
    npy(&array, "<i4", "(4, 2, 4)", &int32(0..32));
    let mut job = job(256);
    job.global_batch = 2;
    let from = |file, start| open(&job, file).unwrap().after(start);
    let first = |file, start, step| from(file, start).unwrap().batch(step).unwrap()[0].data[0];
    assert_eq!([(0, 0), (3, 6), (3, 5), (3, 12)].map(|start| first(&text, start, 3)), [b's', b's', b'p', b'm'].map(f64::from));
    assert_eq!([(0, 0), (3, 6), (3, 4), (1, 4)].map(|start| first(&array, start, 1)), [8.0, 8.0, 0.0, 16.0]);
    assert_eq!([(0, 0), (3, 4), (1, 4)].map(|start| from(&array, start).unwrap().end()), [Some(4), Some(5), Some(3)]);
    let error = from(&array, (3, 5)).err().unwrap().to_string();
    assert!(error.starts_with("5 sequences were read, which is in the midst of a step of 2"), "{error}");
    let error = from(&array, (1, 4)).unwrap().batch(3).unwrap_err().to_string();
    assert!(error.ends_with("has 4 steps; step 5 was asked for"), "{error}");
}

#[test]
fn a_file_is_known_again_by_its_length_its_samples_and_how_it_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    let job = job(256);
    let mark = |file: &Path, encoding| Data::open(&job, &[Spec::parse(&file.display().to_string(), encoding)]).unwrap().marks().remove(0);
    let same = |encoding| mark(&a, Encoding::Bytes).hash == mark(&b, encoding).hash;
    for bytes in [100, 9 << 20] {
        let mut text: Vec<u8> = (0..bytes).map(|k: u32| ((k * 7) >> 3) as u8).collect();
        fs::write(&a, &text).unwrap();
        fs::write(&b, &text).unwrap();
        assert!(same(Encoding::Bytes) && !same(Encoding::U16));
        assert_eq!((mark(&b, Encoding::Bytes).bytes, mark(&b, Encoding::Bytes).input), (u64::from(bytes), "tokens".into()));
        // The hash covers the last byte, and the length of the file.
        *text.last_mut().unwrap() ^= 1;
        fs::write(&b, &text).unwrap();
        assert!(!same(Encoding::Bytes));
        text.remove(50);
        fs::write(&b, &text).unwrap();
        assert!(!same(Encoding::Bytes));
    }
}

#[test]
fn inputs_are_fed_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a.npy"), dir.path().join("b.npy"));
    npy(&a, "<i8", "(1, 2, 3)", &(0..6i64).flat_map(i64::to_le_bytes).collect::<Vec<_>>());
    npy(&b, "|u1", "(1, 2, 3)", &[9, 8, 7, 6, 5, 4]);
    let spec = |text: &str, file: &Path| Spec::parse(&format!("{text}{}", file.display()), Encoding::Text);
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
    assert!(refused().contains("its elements are `<c8`; known are int32, int64, uint32"));
    npy(&file, "<i4", "(2, 2, 4)", &int32(0..17));
    assert!(refused().contains("it goes on after its 64 bytes of data, with 4 more"));
    npy(&file, "<i4", "()", &int32(0..1));
    assert!(refused().contains("its shape is []"));
    npy(&file, "<i4", &"(".repeat(9), &int32(0..1));
    assert!(refused().contains("too many brackets"));
    fs::write(&file, b"\x93NUMPY\x02\x00\xff\xff\xff\xff{").unwrap();
    assert!(refused().contains("its header is damaged"));
    fs::write(&file, b"\x93NUMPY\x01\x00garbage").unwrap();
    assert!(refused().contains("no readable .npy file"));
    fs::write(&file, "abc").unwrap();
    assert!(refused().contains("it has 3 tokens, fewer than one sequence of 3 and the token after it"));
    fs::write(&file, "").unwrap();
    assert!(refused().contains("it is empty"));
    assert!(open(&job(100), dir.path()).err().unwrap().contains("it is a directory, not a file"));
}

#[test]
fn tokens_are_not_read_as_another_dtype_than_their_index_says() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("corpus.bin");
    std::fs::write(&path, [1u32, 2, 3, 4, 5, 6, 7, 8].map(u32::to_le_bytes).concat()).unwrap();
    std::fs::write(dir.path().join("corpus.idx"), [b"MMIDIDX\0\0".as_slice(), &1u64.to_le_bytes(), &[4], &[0; 16]].concat()).unwrap();
    let error = checked(&job(256), &[&path], Encoding::U16).unwrap_err().to_string();
    let says = "the index beside it says that its tokens are int32, and --data-dtype says uint16: --data NAME.bin --data-dtype int32 reads them";
    assert!(error.contains(says), "{error}");
    checked(&job(256), &[&path], Encoding::I32).unwrap();
    checked(&job(256), &[&path], Encoding::U32).unwrap();
}
