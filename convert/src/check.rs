//! Whether a checkpoint has exactly the tensors that are wanted.

use crate::ConvertError;
use crate::tensors::Checkpoint;
use safetensors::Dtype;

/// Holds a checkpoint against names and shapes; `beside` are names of further tensors that it may have.
///
/// # Errors
/// Every tensor that is missing, has another shape, is not f32, f16 or bf16, or is not wanted.
pub fn fits(checkpoint: &Checkpoint, wanted: &[(String, Vec<u64>)], beside: &[String]) -> Result<(), ConvertError> {
    let mut what = vec![];
    for (name, shape) in wanted {
        match checkpoint.tensors.get(name) {
            None => what.push(format!("`{name}` is missing, expected {shape:?}")),
            Some(found) if found.shape != *shape => what.push(format!("`{name}` is {:?}, expected {shape:?}", found.shape)),
            Some(found) if !matches!(found.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) => {
                what.push(format!("`{name}` is of type {:?}, expected F32, F16 or BF16", found.dtype));
            }
            Some(_) => {}
        }
    }
    let known: std::collections::HashSet<&String> = wanted.iter().map(|(name, _)| name).chain(beside).collect();
    for (name, found) in checkpoint.tensors.iter().filter(|(name, _)| !known.contains(name)) {
        what.push(format!("`{name}` {:?} is not a part of the model", found.shape));
    }
    if what.is_empty() { Ok(()) } else { Err(ConvertError::Tensors { path: checkpoint.path.clone(), what }) }
}
