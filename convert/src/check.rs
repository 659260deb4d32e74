//! Whether a checkpoint has exactly the tensors that are wanted.

use crate::ConvertError;
use crate::tensors::{Checkpoint, ElementCoding};
use ir::provenance::few;
use safetensors::Dtype;

/// Holds a checkpoint against names and shapes; `beside` are names of further tensors that it may have.
///
/// # Errors
/// The first tensors of each kind that are missing, have another shape, are not f32, f16 or bf16, or are not wanted,
/// and what `likely` says of the reason.
pub fn fits(
    checkpoint: &Checkpoint,
    wanted: &[(String, Vec<u64>)],
    beside: &[String],
    likely: impl FnOnce() -> Vec<String>,
) -> Result<(), ConvertError> {
    let (mut missing, mut others, mut unwanted) = (vec![], vec![], vec![]);
    for (name, shape) in wanted {
        match checkpoint.tensors.get(name) {
            None => missing.push(format!("`{name}` is missing, expected {shape:?}")),
            Some(found) if found.shape != *shape => others.push(format!("`{name}` is {:?}, expected {shape:?}", found.shape)),
            Some(found) if matches!(found.coding, ElementCoding::Plain) && !matches!(found.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) => {
                others.push(format!("`{name}` is of type {:?}, expected F32, F16 or BF16", found.dtype));
            }
            Some(_) => {}
        }
    }
    let known: std::collections::HashSet<&String> = wanted.iter().map(|(name, _)| name).chain(beside).collect();
    for (name, found) in checkpoint.tensors.iter().filter(|(name, _)| !known.contains(name)) {
        unwanted.push(format!("`{name}` {:?} is not a part of the model", found.shape));
    }
    let kinds = [missing, others, unwanted];
    if kinds.iter().all(Vec::is_empty) {
        return Ok(());
    }
    let what = kinds.iter().flat_map(|kind| few(kind)).chain(likely()).collect();
    Err(ConvertError::Tensors { path: checkpoint.path.clone(), what })
}
