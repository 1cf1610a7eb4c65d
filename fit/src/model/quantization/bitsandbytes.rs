//! The method `bitsandbytes` with four bits: NF4 and FP4, scales as numbers or as bytes. Reads fields; knows no tensor.

use super::{
    Activations, Codes, Fields, GroupIndices, ModelError, Modules, Quantization, Rule, Scheme, SharedBy, Writing,
};

/// Weights that share a scale. The library can be told otherwise, which tensors then say.
const BLOCK: usize = 64;

pub(super) fn read(fields: &Fields) -> Result<Quantization, ModelError> {
    if !fields.flag("load_in_4bit", false)? {
        let problem = "is not true: of bitsandbytes four bits are read; take NF4";
        return Err(fields.error("load_in_4bit", problem.into()));
    }
    match fields.text("bnb_4bit_quant_type")? {
        None | Some("nf4" | "fp4") => {}
        Some(_) => return Err(fields.wrong_text("bnb_4bit_quant_type", "\"nf4\" or \"fp4\"")),
    }
    match fields.text("bnb_4bit_quant_storage")? {
        None | Some("uint8") => {}
        Some(_) => return Err(fields.wrong_text("bnb_4bit_quant_storage", "\"uint8\"")),
    }
    let left_alone = fields.texts("llm_int8_skip_modules")?.unwrap_or_default();
    let refuse = |problem| fields.error("llm_int8_skip_modules", problem);
    let left_alone = Modules::of(&left_alone, Writing::Transformers, refuse)?;
    let scheme = Scheme {
        codes: Codes::Levels,
        shared: SharedBy::Group(BLOCK),
        zero_points: false,
        group_indices: GroupIndices::None,
        scale_names: &["weight.absmax"],
        activations: Activations::AsTheyAre,
    };
    let rules = vec![Rule { modules: Modules::all(), scheme }];
    Ok(Quantization { method: "bitsandbytes", rules, left_alone, with_head: false })
}
