//! The tensors of a quantised projection in its file, found by their names and refused where they are not what their description says.

use safetensors::Dtype;
use stoker_fit::{
    format::WeightFormat,
    model::quantization::{Part, PartKind, Scheme},
};

use crate::model::{ModelError, tensor::Tensor};

/// The tensors of one projection, found by name and checked against their description.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) parts: Vec<(PartKind, Tensor)>,
}

/// Where a projection's tensors are looked for.
pub(in crate::model) struct Place<'a> {
    /// The projection's module.
    pub(in crate::model) module: &'a str,
    /// Outputs and inputs.
    pub(in crate::model) shape: [usize; 2],
    /// What a missing tensor is missing from.
    pub(in crate::model) whole: &'a str,
}

impl Found {
    pub(super) fn of<'a>(
        scheme: &Scheme,
        place: &Place<'_>,
        tensor: impl Fn(&str) -> Option<&'a Tensor>,
    ) -> Result<Self, ModelError> {
        let mut parts = Vec::new();
        for part in scheme.parts(place.shape) {
            let names: Vec<String> = part.names.iter().map(|name| format!("{}.{name}", place.module)).collect();
            match names.iter().find_map(|name| tensor(name)) {
                Some(tensor) => {
                    check(scheme, place, &part, tensor)?;
                    parts.push((part.kind, tensor.clone()));
                }
                None if part.needed => {
                    return Err(missing(scheme, place, &part, names, tensor(&format!("{}.weight", place.module))));
                }
                None => {}
            }
        }
        Ok(Self { parts })
    }

    pub(super) fn get(&self, kind: PartKind) -> Option<&Tensor> {
        self.parts.iter().find(|(found, _)| *found == kind).map(|(_, tensor)| tensor)
    }

    pub(super) fn scales(&self) -> &Tensor {
        self.get(PartKind::Scales).expect("scales are needed")
    }
}

/// Refuses a tensor of another shape or number format than its part has.
fn check(scheme: &Scheme, place: &Place<'_>, part: &Part, tensor: &Tensor) -> Result<(), ModelError> {
    let dtype = dtype_of(tensor);
    if part.kind == PartKind::Codes && is_plain(dtype) {
        return Err(refused(tensor, not_quantised(scheme, place.module, &tensor.format_name())));
    }
    if !part.dtypes.is_empty() && !part.dtypes.contains(&dtype) {
        let expected: Vec<String> = part.dtypes.iter().map(Dtype::to_string).collect();
        let problem = format!("is {dtype}, quantization_config ({scheme}) says {}", expected.join(" or "));
        return Err(refused(tensor, problem));
    }
    if !part.shapes.is_empty() && !part.shapes.contains(&tensor.shape) {
        let hint = other_group_size(scheme, part, tensor, place.shape).unwrap_or_default();
        let (found, expected) = (&tensor.shape, &part.shapes[0]);
        let problem = format!("has shape {found:?}, quantization_config ({scheme}) says {expected:?}{hint}");
        return Err(refused(tensor, problem));
    }
    Ok(())
}

/// The size of groups that scales of another shape would have.
fn other_group_size(scheme: &Scheme, part: &Part, tensor: &Tensor, shape: [usize; 2]) -> Option<String> {
    let is_grouped = part.kind == PartKind::Scales && part.shapes[0].len() == 2;
    let n_groups = *if scheme.is_by_inputs() { tensor.shape.first() } else { tensor.shape.get(1) }?;
    let fits = is_grouped && n_groups > 0 && shape[1].is_multiple_of(n_groups);
    fits.then(|| format!("; groups of {} inputs would fit", shape[1] / n_groups))
}

fn missing(scheme: &Scheme, place: &Place<'_>, part: &Part, names: Vec<String>, plain: Option<&Tensor>) -> ModelError {
    match plain {
        Some(plain) if is_plain(dtype_of(plain)) => {
            refused(plain, not_quantised(scheme, place.module, &plain.format_name()))
        }
        _ => ModelError::MissingTensor {
            file: place.whole.into(),
            tensor: names.join(" or "),
            expected: part.shapes.first().cloned().unwrap_or_default(),
        },
    }
}

fn not_quantised(scheme: &Scheme, module: &str, found: &str) -> String {
    format!("is {found}, quantization_config says {scheme}; name {module} there among the modules that are left alone")
}

pub(super) fn refused(tensor: &Tensor, problem: String) -> ModelError {
    ModelError::Quantised { file: tensor.file.to_string(), tensor: tensor.name.clone(), problem }
}

fn dtype_of(tensor: &Tensor) -> Dtype {
    match tensor.format {
        Ok(WeightFormat::F32) => Dtype::F32,
        Ok(WeightFormat::F16) => Dtype::F16,
        Ok(_) => Dtype::BF16,
        Err(dtype) => dtype,
    }
}

/// Whether numbers stand for themselves.
fn is_plain(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
}
