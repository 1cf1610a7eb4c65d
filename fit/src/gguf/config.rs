//! Hyper-parameters of a GGUF file, in the words of `config.json`.

use serde_json::{Map, Value, json};

use super::{Bytes, Gguf};
use crate::{
    format::WeightFormat,
    model::{FAMILIES, Family, ModelError},
};

const ARCHITECTURE: &str = "general.architecture";

/// The names of keys behind the architecture's, and of the fields they stand for.
const NEEDED: [(&str, &str); 6] = [
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("block_count", "num_hidden_layers"),
    ("attention.head_count", "num_attention_heads"),
    ("context_length", "max_position_embeddings"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
];
const OPTIONAL: [(&str, &str); 8] = [
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.sliding_window", "sliding_window"),
    ("rope.freq_base", "rope_theta"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
    ("rope.scaling.original_context_length", "original_max_position_embeddings"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
];

/// The family that the file's architecture belongs to.
pub(super) fn family_of(gguf: &Gguf<'_>) -> Result<&'static Family, ModelError> {
    let found = gguf.value(ARCHITECTURE);
    let name = found.as_str().ok_or_else(|| gguf.error(ARCHITECTURE, format!("is {found}, expected a name")))?;
    let known = || FAMILIES.iter().filter_map(|family| Some((family, family.gguf?.architecture)));
    let family = known().find(|(_, known)| *known == name).map(|(family, _)| *family);
    family.ok_or_else(|| ModelError::UnsupportedArchitecture {
        file: gguf.file.into(),
        found: name.into(),
        supported: known().map(|(_, name)| name).collect(),
    })
}

pub(super) fn config_json(gguf: &Gguf<'_>, bytes: Bytes<'_>) -> Result<Value, ModelError> {
    let family = family_of(gguf)?;
    let own = |key: &str| format!("{}.{key}", family.gguf.expect("the family was found by it").architecture);
    let mut config = Map::new();
    config.insert("architectures".into(), json!([family.architecture]));
    for (key, field) in NEEDED {
        let value = gguf.value(&own(key));
        if value.is_null() {
            return Err(gguf.error(&own(key), "is missing"));
        }
        config.insert(field.into(), value.clone());
    }
    for (key, field) in OPTIONAL {
        config.insert(field.into(), gguf.value(&own(key)).clone());
    }
    // Files made before these keys existed mean the family's caps.
    ["attn_logit_softcapping", "final_logit_softcapping"].into_iter().for_each(|field| {
        if config[field].is_null() {
            config.remove(field);
        }
    });
    let has = |tensor: &str| gguf.header.tensors.contains_key(tensor);
    config.insert("vocab_size".into(), vocab_size(gguf)?.into());
    config.insert("tie_word_embeddings".into(), (!has("output.weight")).into());
    config.insert("attention_bias".into(), has("blk.0.attn_output.bias").into());
    config.insert("mlp_bias".into(), has("blk.0.ffn_up.bias").into());
    config.insert("bos_token_id".into(), gguf.value("tokenizer.ggml.bos_token_id").clone());
    config.insert("eos_token_id".into(), eos(gguf));
    config.insert("query_pre_attn_scalar".into(), attention_scalar(&config));
    rotary(gguf, bytes, &own("rope"), &mut config)?;
    Ok(Value::Object(config))
}

/// Rows of the embedding table: the list of tokens may be shorter.
fn vocab_size(gguf: &Gguf<'_>) -> Result<usize, ModelError> {
    let table = gguf.header.tensors.get("token_embd.weight");
    let size = table.and_then(|table| table.shape.first());
    size.copied().ok_or_else(|| ModelError::MissingTensor {
        file: gguf.file.into(),
        tensor: "token_embd.weight".into(),
        expected: Vec::new(),
    })
}

/// The end of a text and the end of a turn both end a completion.
fn eos(gguf: &Gguf<'_>) -> Value {
    let ids = ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"].map(|key| gguf.value(key).clone());
    ids.into_iter().filter(|id| !id.is_null()).collect()
}

/// The format does not say that Gemma's largest models scale attention by hidden size / heads: their depth does.
fn attention_scalar(config: &Map<String, Value>) -> Value {
    let is_gemma = config["architectures"][0].as_str().is_some_and(|name| name.starts_with("Gemma"));
    let size = |field: &str| config[field].as_u64();
    match (is_gemma, size("num_hidden_layers"), size("hidden_size"), size("num_attention_heads")) {
        (true, Some(46 | 62), Some(hidden), Some(heads)) if heads > 0 => (hidden / heads).into(),
        _ => Value::Null,
    }
}

/// Llama 3's stretch is stored as a divisor for each frequency, LongRoPE's as two sets of them, others by their names.
fn rotary(gguf: &Gguf<'_>, bytes: Bytes<'_>, prefix: &str, config: &mut Map<String, Value>) -> Result<(), ModelError> {
    let width = gguf.value(&format!("{prefix}.dimension_count"));
    let head_dim =
        match (config["head_dim"].as_u64(), config["hidden_size"].as_u64(), config["num_attention_heads"].as_u64()) {
            (Some(head_dim), _, _) => Some(head_dim),
            (None, Some(hidden), Some(heads)) if heads > 0 => Some(hidden / heads),
            _ => None,
        };
    if let (Some(width), Some(head_dim)) = (width.as_u64(), head_dim.filter(|width| *width > 0)) {
        config.insert("partial_rotary_factor".into(), (width as f64 / head_dim as f64).into());
    }
    let scaling = |key: &str| gguf.value(&format!("{prefix}.scaling.{key}")).clone();
    let [all, short, long] =
        ["rope_freqs", "rope_factors_short", "rope_factors_long"].map(|name| divisors(gguf, bytes, name));
    let settings = match (all?, short?, long?) {
        (Some(divisors), _, _) => json!({"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors,
                                         "attention_factor": 1.0}),
        (None, Some(short), Some(long)) => json!({"rope_type": "longrope", "short_factor": short, "long_factor": long,
                                                  "attention_factor": scaling("attn_factor")}),
        _ if scaling("type").is_string() && scaling("type") != "none" => {
            json!({"rope_type": scaling("type"), "factor": scaling("factor"),
                   "original_max_position_embeddings": scaling("original_context_length")})
        }
        _ => Value::Null,
    };
    config.insert("rope_scaling".into(), settings);
    Ok(())
}

fn divisors(gguf: &Gguf<'_>, bytes: Bytes<'_>, name: &str) -> Result<Option<Vec<f32>>, ModelError> {
    let name = format!("{name}.weight");
    let Some(info) = gguf.header.tensors.get(&name) else { return Ok(None) };
    if info.format != WeightFormat::F32 || info.shape.len() != 1 {
        return Err(gguf.error(&name, "is not a list of F32 numbers"));
    }
    let numbers = bytes(info.range.clone());
    let numbers = numbers.ok_or_else(|| {
        gguf.error(&name, format!("is not in what is here of the file: give its first {} bytes", info.range.end))
    })?;
    Ok(Some(info.format.unpack(&numbers)))
}
