//! The method `compressed-tensors`, as llm-compressor writes it: groups of modules, each with the number of bits and the scales
//! of weights and activations. Reads fields; knows no tensor.

use serde_json::Value;

use super::{
    Activations, Bits, Codes, Fields, GroupIndices, ModelError, Modules, Quantization, Rule, Scheme, SharedBy, Writing,
};

/// Inputs that share a scale in the formats that the Open Compute Project calls MX.
const MX_GROUP: usize = 32;
/// Formats that are read.
const FORMATS: &str =
    "\"float-quantized\", \"int-quantized\", \"naive-quantized\", \"pack-quantized\" or \"mxfp4-pack-quantized\"";

pub(super) fn read(fields: &Fields) -> Result<Quantization, ModelError> {
    refuse_other_states(fields)?;
    let Some(Value::Object(groups)) = fields.get("config_groups") else {
        return Err(fields.error("config_groups", "is missing, or not an object of groups".into()));
    };
    let groups = groups.iter().filter(|(_, group)| !group["weights"].is_null());
    let rules = groups.map(|(name, group)| rule(fields, name, group)).collect::<Result<Vec<_>, _>>()?;
    if rules.is_empty() {
        return Err(fields.error("config_groups", "has no group with weights".into()));
    }
    let ignored = fields.texts("ignore")?.unwrap_or_default();
    let left_alone = Modules::of(&ignored, Writing::CompressedTensors, |problem| fields.error("ignore", problem))?;
    Ok(Quantization { method: "compressed-tensors", rules, left_alone, with_head: true })
}

fn rule(fields: &Fields, name: &str, group: &Value) -> Result<Rule, ModelError> {
    let file = format!("{}.config_groups.{name}", fields.file());
    let group_fields = Fields::of(group, &file)?;
    let targets = group_fields.texts("targets")?.unwrap_or_default();
    let modules = Modules::of(&targets, Writing::CompressedTensors, |problem| group_fields.error("targets", problem))?;
    let weights = Fields::of(&group["weights"], &file)?;
    let format = group_fields.text("format")?.or(fields.text("format")?);
    let shared = shared(&weights)?;
    let codes = codes(&weights, &group_fields, format)?;
    let symmetric = weights.flag("symmetric", true)?;
    if matches!(codes, Codes::E4m3 | Codes::E2m1) && !symmetric {
        return Err(weights.error("symmetric", "is false: floats with zero points are not implemented".into()));
    }
    if codes == Codes::E2m1 && shared != SharedBy::Group(MX_GROUP) {
        return Err(weights.error("group_size", format!("is not {MX_GROUP}, as MXFP4 has it")));
    }
    let scheme = Scheme {
        codes,
        shared,
        zero_points: !symmetric,
        group_indices: group_indices(&weights)?,
        scale_names: &["weight_scale"],
        activations: activations(&group_fields)?,
    };
    Ok(Rule { modules, scheme })
}

fn codes(weights: &Fields, group: &Fields, format: Option<&str>) -> Result<Codes, ModelError> {
    let bits = weights.optional_size("num_bits")?.unwrap_or(8);
    let kind = weights.text("type")?.unwrap_or("int");
    match (format, kind, bits) {
        (Some("float-quantized" | "naive-quantized"), "float", 8) => Ok(Codes::E4m3),
        (Some("int-quantized" | "naive-quantized"), "int", 8) => Ok(Codes::Int8),
        (Some("pack-quantized"), "int", 8) => Ok(Codes::Packed(Bits::Eight)),
        (Some("pack-quantized"), "int", 4) => Ok(Codes::Packed(Bits::Four)),
        (Some("mxfp4-pack-quantized"), "float", 4) => Ok(Codes::E2m1),
        (
            Some("float-quantized" | "int-quantized" | "naive-quantized" | "pack-quantized" | "mxfp4-pack-quantized"),
            _,
            _,
        ) => {
            let problem = format!(
                "is {bits} with type {kind:?} in format {:?}, which is not implemented; take 8 bits of float or int, or 4 \
                 bits of int or, as MXFP4, of float packed",
                format.unwrap_or_default()
            );
            Err(weights.error("num_bits", problem))
        }
        (Some(other), _, _) => Err(group.error("format", format!("is {other:?}, expected {FORMATS}"))),
        (None, _, _) => Err(group.error("format", format!("is missing; it is one of {FORMATS}"))),
    }
}

fn shared(weights: &Fields) -> Result<SharedBy, ModelError> {
    match (weights.text("strategy")?, weights.group_size()?) {
        (Some("tensor"), _) => Ok(SharedBy::Tensor),
        (Some("channel"), _) => Ok(SharedBy::Output),
        (Some("block"), _) => match weights.sizes("block_structure")?.as_deref() {
            Some([outputs, inputs]) => Ok(SharedBy::Block { outputs: *outputs, inputs: *inputs }),
            _ => Err(weights.error("block_structure", "is not two whole numbers, as [128, 128]".into())),
        },
        (Some("group") | None, Some(size)) => Ok(SharedBy::Group(size)),
        (Some("group"), None) => Err(weights.error("group_size", "is missing for groups".into())),
        (None, None) => Ok(SharedBy::Tensor),
        (Some(_), _) => Err(weights.wrong_text("strategy", "\"tensor\", \"channel\", \"group\" or \"block\"")),
    }
}

/// Ordered by weight alone, inputs stay in their groups.
fn group_indices(weights: &Fields) -> Result<GroupIndices, ModelError> {
    match weights.get("actorder") {
        None | Some(Value::Bool(false)) => Ok(GroupIndices::None),
        Some(Value::Bool(true)) => Ok(GroupIndices::Needed),
        Some(Value::String(order)) if matches!(order.as_str(), "weight" | "static") => Ok(GroupIndices::None),
        Some(Value::String(order)) if matches!(order.as_str(), "group" | "dynamic") => Ok(GroupIndices::Needed),
        Some(other) => Err(weights.wrong("actorder", other, "\"group\" or \"weight\"")),
    }
}

fn activations(group: &Fields) -> Result<Activations, ModelError> {
    let activations = group.object("input_activations")?;
    match activations.get("num_bits") {
        None => Ok(Activations::AsTheyAre),
        Some(_) => match activations.get("dynamic") {
            None | Some(Value::Bool(false)) => Ok(Activations::Static),
            Some(_) => Ok(Activations::Dynamic),
        },
    }
}

/// What would change answers or is not stored as it is described.
fn refuse_other_states(fields: &Fields) -> Result<(), ModelError> {
    match fields.text("quantization_status")? {
        None | Some("compressed") => {}
        Some(_) => return Err(fields.wrong_text("quantization_status", "\"compressed\": save it with llm-compressor")),
    }
    let sparsity = fields.object("sparsity_config")?;
    match sparsity.text("format")? {
        None | Some("dense") => {}
        Some(_) => return Err(sparsity.wrong_text("format", "\"dense\": sparse weights are not implemented")),
    }
    match fields.get("transform_config") {
        Some(Value::Object(transforms)) if !transforms.is_empty() => {
            Err(fields.error("transform_config", "is set: rotated activations are not implemented".into()))
        }
        _ => Ok(()),
    }
}
