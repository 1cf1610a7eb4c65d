//! The methods `fp8` (DeepSeek's and Qwen's blocks, and one scale a tensor as AutoFP8 writes it) and `fbgemm_fp8` (one scale an
//! output). Reads fields; knows no tensor.

use super::{
    Activations, Codes, Fields, GroupIndices, ModelError, Modules, Quantization, Rule, Scheme, SharedBy, left_alone,
};

pub(super) fn read(fields: &Fields) -> Result<Quantization, ModelError> {
    refuse_other_formats(fields)?;
    let activations = match fields.text("activation_scheme")? {
        None | Some("dynamic") => Activations::Dynamic,
        Some("static") => Activations::Static,
        Some(_) => return Err(fields.wrong_text("activation_scheme", "\"dynamic\" or \"static\"")),
    };
    let shared = match fields.sizes("weight_block_size")?.as_deref() {
        None => SharedBy::Tensor,
        Some([outputs, inputs]) => SharedBy::Block { outputs: *outputs, inputs: *inputs },
        Some(_) => return Err(fields.wrong_text("weight_block_size", "two whole numbers, as [128, 128]")),
    };
    let scale_names: &[&str] = match shared {
        SharedBy::Block { .. } => &["weight_scale_inv"],
        _ => &["weight_scale", "weight_scale_inv"],
    };
    Ok(quantization("fp8", Scheme { scale_names, ..e4m3(shared, activations) }, left_alone(fields)?))
}

pub(super) fn read_fbgemm(fields: &Fields) -> Result<Quantization, ModelError> {
    Ok(quantization("fbgemm_fp8", e4m3(SharedBy::Output, Activations::Dynamic), left_alone(fields)?))
}

/// Codes of e4m3 whose scales have the usual name.
pub(super) fn e4m3(shared: SharedBy, activations: Activations) -> Scheme {
    Scheme {
        codes: Codes::E4m3,
        shared,
        zero_points: false,
        group_indices: GroupIndices::None,
        scale_names: &["weight_scale"],
        activations,
    }
}

fn quantization(method: &'static str, scheme: Scheme, left_alone: Modules) -> Quantization {
    Quantization { method, rules: vec![Rule { modules: Modules::all(), scheme }], left_alone, with_head: false }
}

/// Fields that say that codes are other than e4m3, or that more than projections has some.
fn refuse_other_formats(fields: &Fields) -> Result<(), ModelError> {
    match fields.text("fmt")? {
        None | Some("e4m3" | "float8_e4m3fn") => {}
        Some(_) => return Err(fields.wrong_text("fmt", "\"e4m3\"")),
    }
    match fields.get("modules_to_convert") {
        Some(value) if value.as_array().is_none_or(|list| !list.is_empty()) => {
            Err(fields.wrong("modules_to_convert", value, "none: only projections are read in FP8"))
        }
        _ => Ok(()),
    }
}
