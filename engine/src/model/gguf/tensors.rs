//! Tensors of a GGUF file under Hugging Face's names, with what has to be undone to have them in its order.

use std::sync::Arc;

use safetensors::Dtype;

use super::{Gguf, config, header::Format};
use crate::model::{
    Family, ModelError, Tensor, WeightStore,
    family::{GgufRows, NormWeight},
    weights::Stored,
};

/// Parts of a layer's names that are the same in every family.
const PARTS: [(&str, &str); 10] = [
    ("attn_q.", "self_attn.q_proj."),
    ("attn_k.", "self_attn.k_proj."),
    ("attn_v.", "self_attn.v_proj."),
    ("attn_qkv.", "self_attn.qkv_proj."),
    ("attn_output.", "self_attn.o_proj."),
    ("attn_q_norm.", "self_attn.q_norm."),
    ("attn_k_norm.", "self_attn.k_norm."),
    ("ffn_gate.", "mlp.gate_proj."),
    ("ffn_up.", "mlp.up_proj."),
    ("ffn_down.", "mlp.down_proj."),
];
/// Those that are settings rather than weights: they went into the configuration.
const SETTINGS: [&str; 3] = ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"];

pub(super) fn weights(gguf: &Gguf) -> Result<WeightStore, ModelError> {
    let family = config::family_of(gguf)?;
    let described = gguf.header.tensors.iter().filter(|(name, _)| !SETTINGS.contains(&name.as_str()));
    let tensors = described.map(|(name, info)| {
        let ours = name_of(name, family).unwrap_or_else(|| name.clone());
        let tensor = |dtype| {
            let content = Arc::clone(&gguf.content);
            Tensor::new(&gguf.file, &ours, dtype, info.shape.clone(), content, info.range.clone())
        };
        let tensor = match info.format {
            Format::Plain(dtype) => tensor(dtype),
            Format::Blocks(blocks) => tensor(Dtype::F32).in_blocks(blocks),
        };
        let paired_heads = paired_heads(gguf, name, family);
        (ours, Stored { tensor, paired_heads })
    });
    // The converter adds the one that Gemma's norms lack.
    Ok(WeightStore::new(tensors.collect(), gguf.file().into(), Some(NormWeight::Factor)))
}

/// Hugging Face's name of a tensor; `None` for one that no family has.
fn name_of(name: &str, family: &Family) -> Option<String> {
    match name {
        "token_embd.weight" => return Some("model.embed_tokens.weight".into()),
        "output_norm.weight" => return Some("model.norm.weight".into()),
        "output.weight" => return Some("lm_head.weight".into()),
        _ => {}
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let (kind, suffix) = part.rsplit_once('.')?;
    let norms = &family.norms;
    let norm = match kind {
        "attn_norm" => norms.before_attention,
        "post_attention_norm" => norms.after_attention,
        "ffn_norm" => norms.before_feed_forward,
        "post_ffw_norm" => norms.after_feed_forward,
        // Gate and up in one matrix go by the name of up.
        "ffn_up" if family.projections == crate::model::family::Projections::Fused => Some("mlp.gate_up_proj"),
        _ => None,
    };
    if let Some(norm) = norm {
        return Some(format!("model.layers.{layer}.{norm}.{suffix}"));
    }
    let (_, ours) = PARTS.iter().find(|(theirs, _)| part.starts_with(theirs))?;
    Some(format!("model.layers.{layer}.{ours}{suffix}"))
}

/// Heads of a projection whose rows are stored in pairs.
fn paired_heads(gguf: &Gguf, name: &str, family: &Family) -> Option<usize> {
    let format = family.gguf.filter(|format| format.rows == GgufRows::Pairs)?;
    let key = match name.strip_prefix("blk.")?.split_once('.')?.1 {
        "attn_q.weight" | "attn_q.bias" => "head_count",
        "attn_k.weight" | "attn_k.bias" => "head_count_kv",
        _ => return None,
    };
    let heads = |key: &str| gguf.value(&format!("{}.attention.{key}", format.architecture)).as_u64();
    usize::try_from(heads(key).or_else(|| heads("head_count"))?).ok()
}
