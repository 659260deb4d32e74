use super::*;
use crate::pickle::Writer;

/// A tensor `w` of so many elements, with these parts, and what is stored of it.
struct TensorCase<'a> {
    size: &'a [u64],
    chunks: &'a [(u64, u64)],
    stored: &'a [(u64, &'a str)],
}

const RIGHT: TensorCase = TensorCase { size: &[5], chunks: &[(0, 3), (3, 2)], stored: &[(0, "a"), (3, "b")] };

fn sizes(w: &mut Writer, n: &[u64]) {
    w.call(SIZE, |w| w.tuple(|w| w.counts(n)));
}

fn made(made: &TensorCase) -> Vec<u8> {
    let mut w = Writer::new();
    w.object(METADATA, |w| {
        w.dict(|w| {
            w.text("state_dict_metadata");
            w.dict(|w| {
                w.text("w");
                w.object(TENSOR, |w| {
                    w.dict(|w| {
                        w.text("properties");
                        w.object(PROPERTIES, |w| {
                            w.tuple(|w| {
                                w.symbol(("torch", "int64"));
                                w.call(LAYOUT, |w| w.tuple(|w| w.text("torch.strided")));
                            });
                        });
                        w.text("size");
                        sizes(w, made.size);
                        w.text("chunks");
                        w.list(|w| {
                            for (from, len) in made.chunks {
                                w.object(CHUNK, |w| {
                                    w.dict(|w| {
                                        w.text("offsets");
                                        sizes(w, &[*from]);
                                        w.text("sizes");
                                        sizes(w, &[*len]);
                                    });
                                });
                            }
                        });
                    });
                });
            });
            w.text("storage_data");
            w.dict(|w| {
                for (offset, file) in made.stored {
                    w.object(INDEX, |w| {
                        w.dict(|w| {
                            w.text("fqn");
                            w.text("w");
                            w.text("offset");
                            sizes(w, &[*offset]);
                        });
                    });
                    w.object(STORAGE, |w| {
                        w.dict(|w| {
                            w.text("relative_path");
                            w.text(file);
                            w.text("offset");
                            w.count(10);
                            w.text("length");
                            w.count(20);
                        });
                    });
                }
            });
        });
    });
    w.finish()
}

fn says(what: &TensorCase) -> String {
    Metadata::read(&made(what)).unwrap_err()
}

#[test]
fn parts_have_places() {
    let metadata = Metadata::read(&made(&RIGHT)).unwrap();
    let [w] = &metadata.tensors[..] else { panic!("no one") };
    assert_eq!((&w.name[..], &w.dtype, &w.shape[..]), ("w", &Ok(Scalar::I64), &[5][..]));
    let parts: Vec<_> = w.parts.iter().map(|(b, p)| (b.from[0], b.sizes[0], &metadata.files[p.file][..], p.byte, p.bytes)).collect();
    assert_eq!(parts, [(0, 3, "a", 10, 20), (3, 2, "b", 10, 20)]);
}

#[test]
fn the_same_part_may_be_said_twice_and_empty_ones_need_no_place() {
    let twice = TensorCase { chunks: &[(0, 3), (3, 2), (3, 2), (5, 0), (5, 0)], stored: &[(0, "a"), (3, "b"), (5, "c")], ..RIGHT };
    let metadata = Metadata::read(&made(&twice)).unwrap();
    assert_eq!(metadata.tensors[0].parts.len(), 2);
    let spare = TensorCase { stored: &[(0, "a"), (3, "b"), (5, "c"), (4, "d"), (2, "e")], ..twice };
    assert_eq!(says(&spare), "something is stored for `w` that is no part of it");
    let metadata = Metadata::read(&made(&TensorCase { chunks: &[(0, 3), (3, 2), (5, 0)], ..RIGHT })).unwrap();
    assert_eq!(metadata.tensors[0].parts.len(), 2);
}

#[test]
fn what_cannot_be_is_refused() {
    for (what, wanted) in [
        (TensorCase { stored: &[(0, "a"), (2, "b")], ..RIGHT }, "`w`: its part at [3] is stored nowhere, or is two parts"),
        (TensorCase { stored: &[(0, "a"), (0, "b")], ..RIGHT }, "`w`: a part is stored twice"),
        (TensorCase { chunks: &[(0, 3), (0, 2)], ..RIGHT }, "`w`: its part at [0] is stored nowhere, or is two parts"),
        (TensorCase { chunks: &[(0, 3)], ..RIGHT }, "something is stored for `w` that is no part of it"),
        (TensorCase { size: &[5, 1], ..RIGHT }, "`w`: a part has 1 dims, and it has 2"),
        (TensorCase { size: &[1 << 62], ..RIGHT }, "`w`: it has too many elements"),
        (TensorCase { size: &[0, 1 << 40, 1 << 40], ..RIGHT }, "`w`: it has too many elements"),
        (TensorCase { size: &[1; 65], ..RIGHT }, "`w`: sizes are no tuple of 64 counts or fewer"),
        (TensorCase { size: &[0], ..RIGHT }, "`w`: it has no elements, and a part of it has"),
        (TensorCase { stored: &[(0, "../a"), (3, "b")], ..RIGHT }, "`w`: it is in `../a`, which is no name of a file beside .metadata"),
        (TensorCase { stored: &[(0, "/dev/zero"), (3, "b")], ..RIGHT }, "`w`: it is in `/dev/zero`, which is no name of a file beside .metadata"),
        (TensorCase { stored: &[(0, ".."), (3, "b")], ..RIGHT }, "`w`: it is in `..`, which is no name of a file beside .metadata"),
    ] {
        assert_eq!(says(&what), wanted);
    }
    assert_eq!(Metadata::read(b"\x80\x02}.").unwrap_err(), "something else is in the place of a Metadata");
    let long = "x".repeat(5000);
    assert_eq!(says(&TensorCase { stored: &[(0, &long)], ..RIGHT }), "`w`: a name is no text of 4096 bytes or less");
}

#[test]
fn cut_anywhere_or_with_any_byte_changed_it_is_read_or_refused() {
    let bytes = made(&RIGHT);
    for k in 0..bytes.len() {
        assert!(Metadata::read(&bytes[..k]).is_err(), "{k}");
        for bit in 0..8 {
            let mut turned = bytes.clone();
            turned[k] ^= 1 << bit;
            let _ = Metadata::read(&turned);
        }
    }
}
