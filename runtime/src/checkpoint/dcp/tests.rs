use super::*;
use crate::checkpoint::Stored;
use crate::host::Tensor;
use std::fs;

/// What two ranks of PyTorch have saved (tests/dcp.py).
fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/dcp")
}

fn copied() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in fs::read_dir(fixture()).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
    }
    dir
}

/// A tensor: its name, sizes and elements.
type NamedTensor = (String, Vec<u64>, Vec<f64>);

/// All tensors.
fn read(dir: &Path) -> Result<Vec<NamedTensor>, String> {
    let wrong = Rc::<OnceCell<WeightsFault>>::default();
    let content = Distributed::open(dir).map_err(|e| e.to_string())?.content(&wrong);
    let whole = |o: FileTensor| {
        let mut numbers = vec![0.0; o.shape.iter().product::<u64>() as usize];
        o.values?.read(0, &mut numbers);
        Ok((o.name, o.shape, numbers))
    };
    let read = content.tensors.into_iter().map(whole).collect::<Result<_, String>>()?;
    if wrong.get().is_some() { Err("a number that cannot be used".into()) } else { Ok(read) }
}

#[test]
fn what_two_ranks_of_pytorch_saved_is_read() {
    let quarters: Vec<f64> = (0..30).map(|n| f64::from(n) / 4.0).collect();
    let turned = (0..6).flat_map(|column| (0..5).map(move |row| f64::from(row * 6 + column) / 4.0)).collect();
    let named = |name: &str, shape: &[u64], numbers: Vec<f64>| (name.to_owned(), shape.to_vec(), numbers);
    let wanted = [
        named("model.cols", &[5, 6], quarters.clone()),
        named("model.one", &[1], vec![2.5]),
        named("model.rep", &[6], (0..6).map(|n| f64::from(-n) / 4.0).collect()),
        named("model.turned", &[6, 5], turned),
        named("model.w", &[5, 6], quarters),
        named("optim.step", &[], vec![7.0]),
    ];
    assert_eq!(read(&fixture()).unwrap(), wanted);
    let distributed = Distributed::open(&fixture()).unwrap();
    assert_eq!((&distributed.others[..], &distributed.about), (&["epoch".to_owned()][..], &None));
    assert_eq!(distributed.verify(), Ok(()));
    // Parts of tensors can be read from any element on.
    let wrong = Rc::<OnceCell<WeightsFault>>::default();
    for (offered, (_, _, all)) in distributed.content(&wrong).tensors.into_iter().zip(&wanted) {
        let values = offered.values.unwrap();
        for (from, to) in (0..all.len()).flat_map(|from| (from..=all.len()).map(move |to| (from, to))) {
            let mut some = vec![f64::NAN; to - from];
            values.read(from as u64, &mut some);
            assert_eq!(some, all[from..to]);
        }
    }
}

#[test]
fn what_is_written_is_read_again() {
    let (dir, empty) = (tempfile::tempdir().unwrap(), Tensor::zeros(vec![0, 3]));
    let scalar = Tensor { sizes: vec![], data: vec![-0.5] };
    // This tensor has more elements than are written at a time.
    let large = Tensor { sizes: vec![3, 50_000], data: (0..150_000).map(f64::from).collect() };
    let tensors = [("empty", &empty), ("large", &large), ("scalar", &scalar)];
    let model = Provenance::new("m", &[("layers".into(), "2".into())], &[]);
    let run = Some(Mark { step: 9, seed: u64::MAX, ..Mark::default() });
    let about = RunMetadata { model, run, conditions: None, artifact: "x".into(), mesh: vec![("tp".into(), 2)] };
    write(dir.path(), tensors.iter().map(|(name, t)| (*name, &t.sizes[..], *t as &dyn Whole)), Some(&about)).unwrap();
    let back: Vec<_> = tensors.iter().map(|(name, t)| (name.to_string(), t.sizes.clone(), t.data.clone())).collect();
    assert_eq!(read(dir.path()).unwrap(), back);
    let distributed = Distributed::open(dir.path()).unwrap();
    assert_eq!((distributed.about.as_ref(), distributed.verify()), (Some(&about), Ok(())));
    assert!(Stored::open(dir.path()).unwrap().others.is_empty());
}

/// What is said of the fixture when a file of it is changed.
fn changed(file: &str, change: impl FnOnce(&mut Vec<u8>)) -> Result<Distributed, String> {
    let dir = copied();
    let path = dir.path().join(file);
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    fs::write(&path, bytes).unwrap();
    Distributed::open(dir.path()).map_err(|e| e.to_string())
}

fn replaced(bytes: &mut Vec<u8>, from: &str, to: &str) {
    let at = bytes.windows(from.len()).position(|w| w == from.as_bytes()).unwrap();
    bytes.splice(at..at + from.len(), to.bytes());
}

#[test]
fn damage_is_found_before_anything_is_read() {
    let says = |file, change: &dyn Fn(&mut Vec<u8>), wanted: &str| {
        let error = changed(file, change).map(drop).unwrap_err();
        assert!(error.starts_with("the checkpoint `") && error.contains(wanted), "{error}");
    };
    says(
        ".metadata",
        &|b| replaced(b, "ChunkStorageMetadata", "ChunkStorageMetadatb"),
        "`torch.distributed.checkpoint.metadata.ChunkStorageMetadatb`",
    );
    says(".metadata", &|b| replaced(b, "__1_0.distcp", "__2_0.distcp"), "__2_0.distcp: No such file");
    says(".metadata", &|b| replaced(b, "__1_0.distcp", "__0_0.distcp"), "shares bytes of __0_0.distcp with another item");
    says(".metadata", &|b| replaced(b, "float32", "float64"), "and .metadata says float64");
    says("__1_0.distcp", &|b| b.truncate(b.len() - 1), "is said to be");
    says("__0_0.distcp", &|b| b[0] ^= 1, "its part in __0_0.distcp: it is not what torch.save writes");
    says("__0_0.distcp", &|b| replaced(b, "FloatStorage", "EvilsStorage"), "`torch.EvilsStorage`");
    says("__0_0.distcp", &|b| replaced(b, "little", "bigger"), "its bytes are in another order");
    says("__0_0.distcp", &|b| b[..9].copy_from_slice(b"\x09\0\0\0\0\0\0\0{"), "it is a safetensors file (HuggingFaceStorageWriter");
    // Only its checksum shows that a value has changed.
    let turned = changed("__0_0.distcp", |b| {
        let quarter = b.windows(4).position(|w| w == 0.25f32.to_le_bytes()).unwrap();
        b[quarter] ^= 1;
    });
    let damage = turned.unwrap().verify().unwrap_err();
    assert!(matches!(&damage[..], [one] if one.contains("__0_0.distcp, `model.w`: archive/data/0: ")), "{damage:?}");
}

#[test]
fn dtypes_that_are_not_read_are_named() {
    let distributed = changed(".metadata", |b| replaced(b, "\x07float16", "\x06uint16")).unwrap();
    assert_eq!(distributed.verify().unwrap_err().len(), 1);
    let dtype = |(meta, tensor): (&metadata::TensorMeta, &TensorResult)| tensor.as_ref().err().map(|e| format!("{} {e}", meta.name));
    let found: Vec<String> = distributed.metadata.tensors.iter().zip(&distributed.tensors).filter_map(dtype).collect();
    assert_eq!(found, ["model.rep torch.uint16"]);
}

#[test]
fn any_byte_may_be_any_other() {
    let dir = copied();
    for file in [".metadata", "__0_0.distcp"] {
        let path = dir.path().join(file);
        let bytes = fs::read(&path).unwrap();
        for k in 0..bytes.len() {
            let mut turned = bytes.clone();
            turned[k] ^= 1 << (k % 8);
            fs::write(&path, &turned).unwrap();
            let _ = read(dir.path());
        }
        for end in (0..bytes.len()).step_by(if file == METADATA { 1 } else { 7 }) {
            fs::write(&path, &bytes[..end]).unwrap();
            assert!(read(dir.path()).is_err(), "{file} {end}");
        }
        fs::write(&path, &bytes).unwrap();
    }
}
