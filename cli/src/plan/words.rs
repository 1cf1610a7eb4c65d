//! A plan as text and as JSON. Pure.

use std::{collections::BTreeSet, fmt::Write as _};

use serde_json::{Value, json};
use stoker_fit::{
    gpu::KvFormat,
    plan::{Fit, Place, RemedyText, gib, grouped},
};

use super::Planned;

/// All of them, one block each.
pub(super) fn text(plans: &[Planned]) -> String {
    let blocks: Vec<String> = plans.iter().map(block).collect();
    blocks.join("\n")
}

fn block(planned: &Planned) -> String {
    let mut text = format!("{}: {} on {}\n", planned.deployment, planned.source, place(planned));
    let mut line = |label: &str, words: String| {
        let _ = writeln!(text, "  {label:<12} {words}");
    };
    match &planned.answer {
        Ok(fit) => {
            line("fits", fit.in_words());
            line("weights", weights(fit, planned.place));
            line("KV cache", cache(fit));
            line("workspace", gib(fit.memory.workspace_bytes));
            line("of", format!("{} that may be used", gib(fit.memory.limit_bytes)));
        }
        Err((misfit, remedies)) => {
            line("does not fit", misfit.cause());
            line("", RemedyText(remedies).to_string());
        }
    }
    text
}

fn place(planned: &Planned) -> String {
    let gpus = planned.gpus;
    let mut text = match planned.place {
        Place::Gpu(card) => {
            let name = planned.kind.as_ref().map_or(card.name, |kind| &kind.product);
            format!("{gpus} x {name}, {} each", gib(card.total_bytes()))
        }
        Place::Host { limit_bytes } => format!("CPUs with {}", gib(limit_bytes)),
    };
    if let Some(kind) = &planned.kind {
        let _ =
            write!(text, " ({} nodes, {} GPUs free, room for {} replicas now)", kind.nodes, kind.free, kind.room_for);
    }
    text
}

fn weights(fit: &Fit, place: Place) -> String {
    let format = match place {
        Place::Host { .. } => "as stored".to_owned(),
        Place::Gpu(_) => {
            let names: BTreeSet<&str> = fit.formats.iter().map(|format| format.name()).collect();
            names.into_iter().collect::<Vec<_>>().join(" and ")
        }
    };
    let each = if fit.n_gpus > 1 { " on each GPU" } else { "" };
    format!("{}{each}, {} parameters, {format}", gib(fit.memory.weights_bytes), billions(fit.n_params))
}

fn cache(fit: &Fit) -> String {
    let format = match fit.kv_format {
        KvFormat::Bf16 => "",
        KvFormat::E4m3 => ", fp8",
    };
    let kib = fit.memory.kv_bytes_per_token as f64 / 1024.0;
    format!("{} for {} tokens, {kib} KiB each{format}", gib(fit.memory.kv_bytes), grouped(fit.memory.kv_tokens()))
}

/// For programs.
pub(super) fn json(plans: &[Planned]) -> Value {
    plans.iter().map(one).collect()
}

fn one(planned: &Planned) -> Value {
    let place = match planned.place {
        Place::Gpu(card) => {
            json!({"gpu": card.name, "memoryBytes": card.total_bytes(), "takenBytes": card.taken_bytes()})
        }
        Place::Host { limit_bytes } => json!({"memoryBytes": limit_bytes}),
    };
    let nodes = planned.kind.as_ref().map(|kind| {
        json!({"product": kind.product, "nodes": kind.nodes, "freeGpus": kind.free, "roomForReplicas": kind.room_for})
    });
    let answer = match &planned.answer {
        Ok(fit) => json!({
            "parameters": fit.n_params,
            "gpus": fit.n_gpus,
            "weightsBytes": fit.memory.weights_bytes,
            "workspaceBytes": fit.memory.workspace_bytes,
            "kvBytesPerToken": fit.memory.kv_bytes_per_token,
            "kvTokens": fit.memory.kv_tokens(),
            "maxModelLen": fit.max_model_len,
            "maxNumSeqs": fit.max_num_seqs,
            "fullSequences": fit.full_sequences(),
        }),
        Err((misfit, remedies)) => json!({
            "reason": misfit.cause(),
            "remedies": remedies.iter().map(ToString::to_string).collect::<Vec<_>>(),
        }),
    };
    json!({
        "deployment": planned.deployment, "source": planned.source, "place": place, "cluster": nodes,
        "fits": planned.answer.is_ok(), "plan": answer,
    })
}

fn billions(count: u64) -> String {
    let count = count as f64;
    if count < 1e9 { format!("{:.1} million", count / 1e6) } else { format!("{:.2} billion", count / 1e9) }
}

#[cfg(test)]
mod tests {
    use stoker_fit::{
        gpu::Card,
        plan::{Asked, Model, plan},
    };

    use super::*;

    #[test]
    fn every_format_of_a_mixture_is_named_and_one_is_named_alone() {
        let said = |left_alone: Value| {
            let config = json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2,
                "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 1000, "max_position_embeddings": 2048,
                "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm",
                    "modules_to_not_convert": left_alone}});
            let place = Place::Gpu(Card::named("H200").unwrap());
            let fit = plan(&Model::from_json(&config, "config.json").unwrap(), &Asked::default(), place).unwrap();
            weights(&fit, place)
        };
        assert!(said(json!(["model.layers.0."])).ends_with("parameters, bf16 and int4"));
        assert!(said(json!([])).ends_with("parameters, int4"));
    }
}
