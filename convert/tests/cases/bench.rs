//! Cases in directories of their own, to be changed.

use convert::{ConvertError, Imported};
use safetensors::SafeTensors;
use std::fs;
use std::path::{Path, PathBuf};

pub fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/cases").join(name)
}

/// All cases.
pub const CASES: [&str; 23] = [
    "gpt2",
    "llama",
    "llama31",
    "qwen2",
    "qwen3",
    "olmo2",
    "mistral",
    "mixtral",
    "qwen3_moe",
    "deepseek_v3",
    "deepseek_mtp",
    "deepseek_yarn",
    "gpt_oss",
    "llama_yarn",
    "phi3",
    "phi3_long",
    "phi3_short",
    "nemotron",
    "gemma2",
    "gemma3",
    "bert",
    "t5",
    "t5_relu",
];

/// A directory with a case's files, to be changed, and what is imported from it.
pub struct Bench {
    pub dir: tempfile::TempDir,
}

impl Bench {
    pub fn new(name: &str) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("in")).unwrap();
        for file in ["config.json", "model.safetensors"] {
            fs::copy(case(name).join(file), dir.path().join("in").join(file)).unwrap();
        }
        Bench { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn import(&self) -> Result<Imported, ConvertError> {
        convert::import(&self.path("in"), &self.path("out"))
    }

    pub fn error(&self) -> String {
        let error = self.import().unwrap_err().to_string();
        assert!(!self.path("out").exists(), "something was written");
        error
    }

    pub fn export(&self) -> Result<convert::Exported, ConvertError> {
        convert::export(&self.path("out/weights.safetensors"), Some(&self.path("out/model.mdl")), &[], None, &self.path("back"))
    }

    /// Replaces the tensors by what a function makes of their list of name, dtype, shape and bytes.
    pub fn tensors(&self, change: impl FnOnce(&mut Vec<Tensor>)) {
        let path = self.path("in/model.safetensors");
        let mut list = read(&path);
        change(&mut list);
        save(&path, &list);
    }

    /// Weights as another program would write them, which do not say which model they are of.
    pub fn anonymous(&self, name: &str) {
        let path = self.path(name);
        save(&path, &read(&path));
    }

    pub fn same(&self, a: &str, b: &str) {
        assert!(fs::read(self.path(a)).unwrap() == fs::read(self.path(b)).unwrap(), "{a} differs from {b}");
    }
}

pub type Tensor = (String, safetensors::Dtype, Vec<usize>, Vec<u8>);

pub fn read(path: &Path) -> Vec<Tensor> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut list: Vec<Tensor> = file.iter().map(|(n, t)| (n.to_owned(), t.dtype(), t.shape().to_vec(), t.data().to_vec())).collect();
    list.sort_by(|a, b| a.0.cmp(&b.0));
    list
}

pub fn save(path: &Path, list: &[Tensor]) {
    let views = list.iter().map(|(n, d, s, b)| (n.as_str(), safetensors::tensor::TensorView::new(*d, s.clone(), b).unwrap()));
    fs::write(path, safetensors::serialize(views, Some([("format".to_owned(), "pt".to_owned())].into())).unwrap()).unwrap();
}
