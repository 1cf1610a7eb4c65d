//! The methods `awq` (AutoAWQ's packing for GEMMs) and `gptq` (with act-order, both ways of storing zero points). Reads fields;
//! knows no tensor.

use serde_json::Value;

use super::{
    Activations, Bits, Codes, Fields, GroupIndices, ModelError, Modules, Quantization, Rule, Scheme, SharedBy, Writing,
    left_alone,
};

pub(super) fn read_awq(fields: &Fields) -> Result<Quantization, ModelError> {
    match (bits(fields)?, fields.text("version")?.or(fields.text("format")?)) {
        (Bits::Four, None) => {}
        (Bits::Four, Some(version)) if version.eq_ignore_ascii_case("gemm") => {}
        (Bits::Eight, _) => return Err(fields.error("bits", "is 8, expected 4, which is all that AWQ packs".into())),
        (_, Some(other)) => {
            return Err(
                fields.error("version", format!("is {other:?}, expected \"gemm\": other packings are not read"))
            );
        }
    }
    if !fields.flag("zero_point", true)? {
        return Err(fields.error("zero_point", "is false: AWQ without zero points is not implemented".into()));
    }
    let scheme = integers(fields, Codes::Awq, GroupIndices::None)?;
    let rules = vec![Rule { modules: Modules::all(), scheme }];
    Ok(Quantization { method: "awq", rules, left_alone: left_alone(fields)?, with_head: false })
}

pub(super) fn read_gptq(fields: &Fields) -> Result<Quantization, ModelError> {
    let zeros_less_one = match fields.text("checkpoint_format")?.or(fields.text("format")?) {
        None | Some("gptq") => true,
        Some("gptq_v2") => false,
        Some(other) => {
            let problem = format!("is {other:?}, expected \"gptq\" or \"gptq_v2\": other packings are not read");
            return Err(fields.error("checkpoint_format", problem));
        }
    };
    if let Some(modules) = fields.get("modules_in_block_to_quantize") {
        return Err(fields.wrong("modules_in_block_to_quantize", modules, "none: all projections are quantised"));
    }
    let codes = Codes::Gptq { bits: bits(fields)?, zeros_less_one };
    // Without act-order the tensor is there as well, in order.
    let in_any_order = fields.flag("desc_act", false)?;
    let indices = if in_any_order { GroupIndices::Needed } else { GroupIndices::Optional };
    let rules = vec![Rule { modules: Modules::all(), scheme: integers(fields, codes, indices)? }];
    let with_head = fields.flag("lm_head", false)?;
    Ok(Quantization { method: "gptq", rules, left_alone: left_out(fields)?, with_head })
}

fn bits(fields: &Fields) -> Result<Bits, ModelError> {
    // AutoAWQ's own files say `w_bit`.
    match fields.optional_size("bits")?.or(fields.optional_size("w_bit")?) {
        Some(4) => Ok(Bits::Four),
        Some(8) => Ok(Bits::Eight),
        Some(other) => Err(fields.error("bits", format!("is {other}, expected 4 or 8"))),
        None => Err(fields.error("bits", "is missing".into())),
    }
}

fn integers(fields: &Fields, codes: Codes, group_indices: GroupIndices) -> Result<Scheme, ModelError> {
    Ok(Scheme {
        codes,
        shared: fields.group_size()?.map_or(SharedBy::Output, SharedBy::Group),
        zero_points: true,
        group_indices,
        scale_names: &["scales"],
        activations: Activations::AsTheyAre,
    })
}

/// GPTQModel's `dynamic`: patterns with `-:` leave modules alone; others give them numbers of their own.
fn left_out(fields: &Fields) -> Result<Modules, ModelError> {
    let rules = match fields.get("dynamic") {
        None => return Ok(Modules::default()),
        Some(Value::Object(rules)) => rules,
        Some(other) => return Err(fields.wrong("dynamic", other, "an object of patterns")),
    };
    let pattern = |rule: &'_ String| match rule.strip_prefix("-:") {
        Some(_) => Ok(()),
        None => {
            Err(fields.error("dynamic", format!("has {rule:?}: modules with other bits than the rest are not read")))
        }
    };
    rules.keys().try_for_each(pattern)?;
    let patterns: Vec<&str> = rules.keys().filter_map(|rule| rule.strip_prefix("-:")).collect();
    Modules::of(&patterns, Writing::Pattern, |problem| fields.error("dynamic", problem))
}
