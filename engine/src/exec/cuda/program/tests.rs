//! Programs of families, formats and shares of ranks, in a word an operation.

use serde_json::{Value, json};
use stoker_fit::gpu::{Capacity, CodeSums, GroupSize, SplitPolicy, StepBounds, WeightFormat, prefill_split};
use stoker_kernels::{choose::Numerics, device::Properties};

use super::*;
use crate::{
    config::Quantization,
    model::{
        CheckpointFormat, ModelConfig, ModelSpec,
        spec::{Rank, Stage},
    },
};

fn spec(architecture: &str, changes: Value) -> ModelSpec {
    let mut config = json!({"architectures": [architecture], "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "max_position_embeddings": 8192});
    for (name, value) in changes.as_object().unwrap() {
        config[name] = value.clone();
    }
    let config = ModelConfig::from_json(&config, "config.json").unwrap();
    ModelSpec::new(&config, CheckpointFormat::HuggingFace).unwrap()
}

fn programs(architecture: &str, changes: Value, numerics: Numerics) -> Programs {
    resolved((architecture, changes), numerics, Rank::ALONE, None).0
}

/// Of a share of a model on an H200.
fn resolved(
    (architecture, changes): (&str, Value),
    numerics: Numerics,
    rank: Rank,
    quantization: Option<Quantization>,
) -> (Programs, ModelShape) {
    let chip = Chip::of_table("NVIDIA H200", numerics).unwrap();
    let spec = spec(architecture, changes);
    let shape = ModelShape::of(&spec, rank).unwrap();
    let shape = shape.stored_as_described(&spec, chip.properties(), quantization).unwrap();
    (Programs::new(&shape, &chip, RowLimits { max_sampled: 256, max_rows: 8192 }), shape)
}

/// A word an operation.
fn brief(ops: &[Op]) -> String {
    let words = ops.iter().map(|op| match op {
        Op::Embed => "embed".to_owned(),
        Op::Quantise(reads, rows) => {
            format!("quantise-{reads:?}{}", if *rows == Rows::Plain { "" } else { "-beside-codes" })
        }
        Op::Widen { matrix, .. } => format!("widen-{matrix:?}"),
        Op::Norm(Between { adds, next, quantises }) => {
            let adds = match adds {
                Adds::Nothing => "",
                Adds::Update => "add+",
                Adds::NormedUpdate(_) => "norm+add+",
                Adds::Ranks(_) => "reduce+add+",
                Adds::RanksShares { copies_residual: false, .. } => "reduce-shares+add+",
                Adds::RanksShares { copies_residual: true, .. } => "reduce-shares+add+copy+",
            };
            let next = if next.is_some() { "norm" } else { "." };
            let quantised = quantises.map_or("", |rows| match rows {
                Rows::Plain => "-quantised",
                Rows::BesideCodes => "-quantised-beside-codes",
            });
            format!("{adds}{next}{quantised}")
        }
        Op::Gemm(Gemm { matrix, desc, reads, .. }) => {
            let (scaled, is_normed) = match desc.prologue {
                Prologue::Plain => ("", false),
                Prologue::NormScaled => ("scaled-", false),
                Prologue::Normed => ("normed-", true),
            };
            let of = if *reads == Reads::Residual && !is_normed { "-of-residual" } else { "" };
            format!("{scaled}{matrix:?}{of}:{:?}", desc.epilogue)
        }
        Op::AddBias { matrix, .. } => format!("bias-{matrix:?}"),
        Op::Activate => "act".to_owned(),
        Op::NormQk { .. } => "norm-qk".to_owned(),
        Op::RopeKv { .. } => "rope".to_owned(),
        Op::Attention { .. } => "attend".to_owned(),
        Op::KeepDrawn => "keep".to_owned(),
        Op::Reduce { .. } => "reduce".to_owned(),
        Op::Softcap => "softcap".to_owned(),
        Op::Draw => "draw".to_owned(),
    });
    words.collect::<Vec<_>>().join(" ")
}

fn check(programs: &Programs, n: usize, body: &str, tail: &str) {
    assert_eq!(brief(&programs.body(n).ops), body, "body of {n} rows");
    assert_eq!(brief(&programs.tail(n, Sampled::Every)), tail, "tail of {n} rows");
}

#[test]
fn norms_and_additions_go_inside_of_gemms_where_rows_are_few() {
    let llama = programs("LlamaForCausalLM", json!({}), Numerics::Fastest);
    check(
        &llama,
        8,
        "embed norm Qkv:Bf16 rope attend O:Update scaled-GateUp:Gated Down:Update scaled-Qkv:Bf16 rope",
        "attend O:Update scaled-GateUp:Gated Down:Update norm Head:F32 draw",
    );
    check(
        &llama,
        64,
        "embed norm Qkv:Bf16 rope attend O:Bf16 add+norm GateUp:Gated Down:Bf16 add+norm Qkv:Bf16 rope",
        "attend O:Bf16 add+norm GateUp:Gated Down:Bf16 add+norm Head:F32 draw",
    );
    let body = brief(&llama.body(4096).ops);
    assert!(body.starts_with("embed norm Qkv:Bf16 rope attend O:Sum norm GateUp:Gated Down:Sum norm"), "{body}");
    let listed = brief(&llama.tail(1, Sampled::Listed));
    assert_eq!(listed, "attend keep O:Update scaled-GateUp:Gated Down:Update scaled-Head:F32 draw");
}

#[test]
fn what_a_gemm_gives_is_normed_and_then_added_where_a_family_does_so() {
    let gemma = json!({"head_dim": 256, "num_attention_heads": 16, "sliding_window": 4096});
    check(
        &programs("Gemma2ForCausalLM", gemma, Numerics::Fastest),
        8,
        "embed norm Qkv:Bf16 rope attend O:Bf16 norm+add+norm GateUp:Bf16 act Down:Bf16 norm+add+norm Qkv:Bf16 rope",
        "attend O:Bf16 norm+add+norm GateUp:Bf16 act Down:Bf16 norm+add+norm Head:F32 softcap draw",
    );
    check(
        &programs("Olmo2ForCausalLM", json!({}), Numerics::Fastest),
        8,
        "embed Qkv-of-residual:Bf16 norm-qk rope attend O:Bf16 norm+add+. GateUp-of-residual:Gated Down:Bf16 \
         norm+add+. Qkv-of-residual:Bf16 norm-qk rope",
        "attend O:Bf16 norm+add+. GateUp-of-residual:Gated Down:Bf16 norm+add+norm Head:F32 draw",
    );
}

#[test]
fn biases_are_added_to_what_a_gemm_gave_before_it_is_added_or_activated() {
    check(
        &programs("LlamaForCausalLM", json!({"attention_bias": true, "mlp_bias": true}), Numerics::Fastest),
        8,
        "embed norm Qkv:Bf16 rope attend O:Bf16 bias-O add+norm GateUp:Bf16 bias-GateUp act Down:Bf16 bias-Down \
         add+norm Qkv:Bf16 rope",
        "attend O:Bf16 bias-O add+norm GateUp:Bf16 bias-GateUp act Down:Bf16 bias-Down add+norm Head:F32 draw",
    );
}

fn shared(architecture: &str, changes: Value, quantization: Option<Quantization>) -> (Programs, ModelShape) {
    shared_by(2, architecture, changes, quantization)
}

fn shared_by(
    n_ranks: usize,
    architecture: &str,
    changes: Value,
    quantization: Option<Quantization>,
) -> (Programs, ModelShape) {
    resolved((architecture, changes), Numerics::Fastest, Rank { idx: 1, of: n_ranks }, quantization)
}

#[test]
fn ranks_add_up_what_they_gave_where_it_is_added_to_the_residual() {
    let (llama, shape) = shared("LlamaForCausalLM", json!({}), None);
    assert_eq!((shape.heads.n_q, shape.heads.n_kv, shape.inner, shape.own_tokens()), (16, 4, 7168, 64128..128256));
    for n in [1, 8, 64] {
        let layer = "O:Bf16 reduce+add+norm GateUp:Gated Down:Bf16 reduce+add+norm";
        let body = format!("embed norm Qkv:Bf16 rope attend {layer} Qkv:Bf16 rope");
        assert_eq!(brief(&llama.body(n).ops), body, "body of {n} rows");
        let tail = format!("attend {layer} Head:F32 draw");
        assert_eq!(brief(&llama.tail(n, Sampled::Every)), tail, "tail of {n} rows");
    }
    let widths = |matrix: Matrix| matrix.sizes(&shape);
    assert_eq!(widths(Matrix::Qkv), (3072, 4096));
    assert_eq!((widths(Matrix::O), widths(Matrix::Down)), ((4096, 2048), (4096, 7168)));
    assert_eq!((widths(Matrix::GateUp), widths(Matrix::Head)), ((14336, 4096), (64128, 4096)));
    let (fp8, _) = shared("LlamaForCausalLM", json!({}), Some(Quantization::Fp8));
    assert!(brief(&fp8.body(64).ops).contains("O:Bf16 reduce+add+norm-quantised GateUp:Gated quantise-Activated"));
}

/// In front of the last layer, of which drawn rows alone are computed to the end, all ranks get the residual of all rows.
#[test]
fn ranks_share_rows_out_where_they_are_more_than_may_be_drawn() {
    let layer = |end| format!("O:Bf16 reduce-shares+add+norm GateUp:Gated Down:Bf16 {end} Qkv:Bf16 rope");
    let (inner, last) = (layer("reduce-shares+add+norm"), layer("reduce-shares+add+copy+norm"));
    let (llama, _) = shared_by(4, "LlamaForCausalLM", json!({"num_hidden_layers": 3}), None);
    let body = |n| (brief(&llama.body(n).ops), llama.body(n).shares_rows);
    let expected = format!("embed norm Qkv:Bf16 rope attend {inner} attend {last}");
    assert_eq!([body(1024), body(4096)], [(expected.clone(), true), (expected, true)]);
    assert_eq!([body(256).1, body(257).1], [false, true]);
    let (of_two, _) = shared("LlamaForCausalLM", json!({}), None);
    assert!(!of_two.body(4096).shares_rows, "{}", brief(&of_two.body(4096).ops));
    let (gemma, _) = shared_by(4, "Gemma2ForCausalLM", json!({"head_dim": 256, "num_attention_heads": 16}), None);
    assert!(!gemma.body(4096).shares_rows, "{}", brief(&gemma.body(4096).ops));
    let (fp8, _) = shared("LlamaForCausalLM", json!({}), Some(Quantization::Fp8));
    assert!(brief(&fp8.body(4096).ops).contains("Down:Bf16 reduce-shares+add+copy+norm-quantised Qkv:Bf16"));
}

#[test]
fn what_ranks_gave_is_a_row_of_its_own_where_a_bias_or_a_norm_is_between_it_and_the_residual() {
    let (biased, _) = shared("LlamaForCausalLM", json!({"mlp_bias": true, "attention_bias": true}), None);
    let body = brief(&biased.body(8).ops);
    assert!(
        body.contains("O:Bf16 reduce bias-O add+norm GateUp:Bf16 bias-GateUp act Down:Bf16 reduce bias-Down"),
        "{body}"
    );
    let gemma = json!({"head_dim": 256, "num_attention_heads": 16, "sliding_window": 4096});
    let (gemma, _) = shared("Gemma2ForCausalLM", gemma, None);
    let tail = brief(&gemma.tail(8, Sampled::Every));
    let expected =
        "attend O:Bf16 reduce norm+add+norm GateUp:Bf16 act Down:Bf16 reduce norm+add+norm Head:F32 softcap draw";
    assert_eq!(tail, expected);
}

fn quantised(architecture: &str, changes: Value, numerics: Numerics) -> Programs {
    resolved((architecture, changes), numerics, Rank::ALONE, Some(Quantization::Fp8)).0
}

#[test]
fn quantised_products_read_what_norms_leave_quantised_and_one_row_stays_as_it_is() {
    let llama = quantised("LlamaForCausalLM", json!({}), Numerics::Fastest);
    check(
        &llama,
        1,
        "embed norm Qkv:Bf16 rope attend O:Update scaled-GateUp:Gated Down:Update scaled-Qkv:Bf16 rope",
        "attend O:Update scaled-GateUp:Gated Down:Update scaled-Head:F32 draw",
    );
    let layer = "quantise-Attended O:Bf16 add+norm-quantised GateUp:Gated quantise-Activated Down:Bf16";
    for n in [8, 64, 256] {
        check(
            &llama,
            n,
            &format!("embed norm-quantised Qkv:Bf16 rope attend {layer} add+norm-quantised Qkv:Bf16 rope"),
            &format!("attend {layer} add+norm Head:F32 draw"),
        );
    }
    assert_eq!(brief(&llama.body(256).ops), brief(&llama.body(8192).ops));
    let gemma = json!({"head_dim": 256, "num_attention_heads": 16, "sliding_window": 4096});
    check(
        &quantised("Gemma2ForCausalLM", gemma, Numerics::Fastest),
        8,
        "embed norm quantise-Normed Qkv:Bf16 rope attend quantise-Attended O:Bf16 norm+add+norm quantise-Normed \
         GateUp:Bf16 act quantise-Activated Down:Bf16 norm+add+norm quantise-Normed Qkv:Bf16 rope",
        "attend quantise-Attended O:Bf16 norm+add+norm quantise-Normed GateUp:Bf16 act quantise-Activated Down:Bf16 \
         norm+add+norm Head:F32 softcap draw",
    );
    let invariant = quantised("LlamaForCausalLM", json!({}), Numerics::BatchInvariant);
    assert_eq!(brief(&invariant.body(1).ops), brief(&invariant.body(4096).ops));
}

const AWQ: &str = r#"{"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm"}"#;

fn four_bits(numerics: Numerics, architecture: &str, changes: Value) -> (Programs, ModelShape) {
    four_bits_as(AWQ, numerics, architecture, changes)
}

fn four_bits_as(config: &str, numerics: Numerics, architecture: &str, mut changes: Value) -> (Programs, ModelShape) {
    changes["quantization_config"] = serde_json::from_str(config).unwrap();
    resolved((architecture, changes), numerics, Rank::ALONE, None)
}

#[test]
fn weights_of_four_bits_are_multiplied_with_norms_and_additions_inside_where_rows_are_few() {
    let (llama, shape) = four_bits(Numerics::Fastest, "LlamaForCausalLM", json!({}));
    for n in [1, 8, 16] {
        check(
            &llama,
            n,
            "embed norm Qkv:Bf16 rope attend O:Update scaled-GateUp:Gated Down:Update scaled-Qkv:Bf16 rope",
            &format!(
                "attend O:Update scaled-GateUp:Gated Down:Update {} draw",
                if n == 1 { "scaled-Head:F32" } else { "norm Head:F32" }
            ),
        );
    }
    // Of two layers, half a byte a weight and four bytes a group of 128.
    let values = 6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336;
    assert_eq!(shape.sizes().weights_bytes(2 * values + 10), 20 + 2 * (values / 2 + values / 128 * 4));
}

#[test]
fn weights_of_four_bits_in_groups_of_128_are_beside_rows_of_e4m3_where_rows_are_some() {
    let (llama, shape) = four_bits(Numerics::Fastest, "LlamaForCausalLM", json!({}));
    assert_eq!(shape.sizes().formats(), [WeightFormat::Int4(GroupSize::G128)].into());
    for n in [24, 32, 64, 128, 256] {
        check(
            &llama,
            n,
            "embed norm-quantised-beside-codes Qkv:Bf16 rope attend quantise-Attended-beside-codes O:Bf16 \
             add+norm-quantised-beside-codes GateUp:Gated quantise-Activated-beside-codes Down:Bf16 \
             add+norm-quantised-beside-codes Qkv:Bf16 rope",
            "attend quantise-Attended-beside-codes O:Bf16 add+norm-quantised-beside-codes GateUp:Gated \
             quantise-Activated-beside-codes Down:Bf16 add+norm Head:F32 draw",
        );
    }
    assert_eq!(brief(&llama.body(512).ops), brief(&llama.body(64).ops));
    let plain = "embed norm Qkv:Bf16 rope attend O:Bf16 add+norm GateUp:Gated Down:Bf16 add+norm Qkv:Bf16 rope";
    let narrow = AWQ.replace("128", "32");
    let (narrow, shape) = four_bits_as(&narrow, Numerics::Fastest, "LlamaForCausalLM", json!({}));
    assert_eq!(shape.sizes().formats(), [WeightFormat::Int4(GroupSize::G32)].into());
    assert_eq!([64, 128].map(|n| brief(&narrow.body(n).ops)), [plain, plain]);
    // Depths that are no whole groups.
    let odd = json!({"intermediate_size": 14_352});
    let (odd, _) = four_bits(Numerics::Fastest, "LlamaForCausalLM", odd);
    let body = brief(&odd.body(64).ops);
    assert!(body.contains("quantise-Attended-beside-codes") && !body.contains("quantise-Activated"), "{body}");
}

#[test]
fn weights_of_four_bits_in_other_groups_are_widened_for_many_rows_the_more_where_a_norm_quantises_these() {
    let narrow = AWQ.replace("128", "32");
    let (llama, _) = four_bits_as(&narrow, Numerics::Fastest, "LlamaForCausalLM", json!({}));
    check(
        &llama,
        256,
        "embed norm-quantised widen-Qkv Qkv:Bf16 rope attend O:Bf16 add+norm-quantised widen-GateUp GateUp:Gated Down:Bf16 \
         add+norm-quantised widen-Qkv Qkv:Bf16 rope",
        "attend O:Bf16 add+norm-quantised widen-GateUp GateUp:Gated Down:Bf16 add+norm Head:F32 draw",
    );
    let (llama, _) = four_bits(Numerics::Fastest, "LlamaForCausalLM", json!({}));
    let most = "embed norm-quantised widen-Qkv Qkv:Bf16 rope attend quantise-Attended widen-O O:Bf16 add+norm-quantised \
                widen-GateUp GateUp:Gated quantise-Activated widen-Down Down:Bf16 add+norm-quantised widen-Qkv Qkv:Bf16 rope";
    assert_eq!([1024, 8192].map(|n| brief(&llama.body(n).ops)), [most, most]);
    // Its norms leave bf16: rows are quantised by launches of their own.
    let gemma = json!({"head_dim": 256, "num_attention_heads": 16, "sliding_window": 4096});
    let (gemma, _) = four_bits_as(&narrow, Numerics::Fastest, "Gemma2ForCausalLM", gemma);
    let [some, many] = [256, 512].map(|n| brief(&gemma.body(n).ops));
    assert!(!some.contains("widen"), "{some}");
    assert!(many.starts_with("embed norm quantise-Normed widen-Qkv Qkv:Bf16"), "{many}");
    // Depths that e4m3 is not multiplied at.
    let (narrow, _) = four_bits(Numerics::Fastest, "LlamaForCausalLM", json!({"intermediate_size": 14_344}));
    let body = brief(&narrow.body(8192).ops);
    assert!(body.contains("widen-GateUp") && !body.contains("widen-Down"), "{body}");
}

/// What many checkpoints leave alone is multiplied in bf16, and what is beside it keeps what it has.
#[test]
fn each_projection_is_multiplied_in_its_own_format() {
    let mut awq: Value = serde_json::from_str(AWQ).unwrap();
    awq["modules_to_not_convert"] = json!(["model.layers.0.", "down_proj"]);
    let (llama, _) = four_bits_as(&awq.to_string(), Numerics::Fastest, "LlamaForCausalLM", json!({}));
    check(
        &llama,
        64,
        "embed norm Qkv:Bf16 rope attend O:Bf16 add+norm GateUp:Gated Down:Bf16 add+norm-quantised-beside-codes Qkv:Bf16 rope",
        "attend quantise-Attended-beside-codes O:Bf16 add+norm-quantised-beside-codes GateUp:Gated Down:Bf16 add+norm Head:F32 draw",
    );
    let operands = |n: usize| {
        let (body, tail) = (llama.body(n), llama.tail(n, Sampled::Every));
        let gemms = body.ops.iter().chain(tail.iter()).filter_map(Op::gemm);
        gemms.map(|gemm| (gemm.matrix, gemm.desc.operands)).collect::<Vec<_>>()
    };
    let plain = [Matrix::Qkv, Matrix::O, Matrix::GateUp, Matrix::Down].map(|matrix| (matrix, Operands::Bf16));
    let with = |operands| {
        let second = [Matrix::Qkv, Matrix::O, Matrix::GateUp].map(|matrix| (matrix, operands));
        let bf16 = [Matrix::Down, Matrix::Head].map(|matrix| (matrix, Operands::Bf16));
        [&plain[..], &second, &bf16].concat()
    };
    assert_eq!(operands(1), with(Operands::Int4));
    assert_eq!(operands(64), with(Operands::Int4BesideE4m3));
    // Attention in e4m3, the feed-forward in four bits: what many prompts' rows become differs by what reads them.
    let mixed = json!({"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"], "config_groups": {
        "group_0": {"targets": ["re:.*self_attn.*"], "format": "float-quantized",
            "weights": {"num_bits": 8, "type": "float", "symmetric": true, "strategy": "channel"}},
        "group_1": {"targets": ["re:.*mlp.*"], "format": "pack-quantized",
            "weights": {"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 128}}}});
    let (llama, _) = four_bits_as(&mixed.to_string(), Numerics::Fastest, "LlamaForCausalLM", json!({}));
    check(
        &llama,
        64,
        "embed norm-quantised Qkv:Bf16 rope attend quantise-Attended O:Bf16 add+norm-quantised-beside-codes GateUp:Gated \
         quantise-Activated-beside-codes Down:Bf16 add+norm-quantised Qkv:Bf16 rope",
        "attend quantise-Attended O:Bf16 add+norm-quantised-beside-codes GateUp:Gated quantise-Activated-beside-codes Down:Bf16 \
         add+norm Head:F32 draw",
    );
}

#[test]
fn where_bits_count_all_rows_are_beside_codes_in_groups_of_128_and_one_is_normed_and_quantised_by_products() {
    let invariant = |config: &str| four_bits_as(config, Numerics::BatchInvariant, "LlamaForCausalLM", json!({})).0;
    let wide = invariant(AWQ);
    check(
        &wide,
        1,
        "embed normed-Qkv:Bf16 rope attend O:Sum normed-GateUp:Gated Down:Sum normed-Qkv:Bf16 rope",
        "attend O:Sum normed-GateUp:Gated Down:Sum norm Head:F32 draw",
    );
    for n in [2, 16, 64, 256] {
        check(
            &wide,
            n,
            "embed norm-quantised-beside-codes Qkv:Bf16 rope attend quantise-Attended-beside-codes O:Bf16 \
             add+norm-quantised-beside-codes GateUp:Gated quantise-Activated-beside-codes Down:Bf16 \
             add+norm-quantised-beside-codes Qkv:Bf16 rope",
            "attend quantise-Attended-beside-codes O:Bf16 add+norm-quantised-beside-codes GateUp:Gated \
             quantise-Activated-beside-codes Down:Bf16 add+norm Head:F32 draw",
        );
    }
    assert_eq!(brief(&wide.body(4096).ops), brief(&wide.body(2).ops));
    let operands =
        |n: usize| wide.body(n).ops.iter().filter_map(Op::gemm).map(|gemm| gemm.desc.operands).collect::<Vec<_>>();
    assert_eq!([1, 16, 4096].map(operands), [const { Operands::Int4BesideE4m3 }; 3].map(|operands| vec![operands; 5]));
    let narrow = invariant(&AWQ.replace("128", "32"));
    let plain = "embed norm Qkv:Bf16 rope attend O:Bf16 add+norm GateUp:Gated Down:Bf16 add+norm Qkv:Bf16 rope";
    assert_eq!([1, 64, 4096].map(|n| brief(&narrow.body(n).ops)), [plain; 3]);
}

#[test]
fn what_is_widened_or_beside_codes_has_room_for_the_largest_projection_where_steps_have_so_many_rows() {
    let (_, shape) = four_bits(Numerics::Fastest, "LlamaForCausalLM", json!({}));
    let fastest = SplitPolicy::Balanced { n_slots: 264 };
    let of = |max_rows, policy| {
        let bounds = StepBounds {
            heads: shape.heads,
            policy,
            prefill_split: prefill_split((9, 0), 132),
            max_num_seqs: 64,
            max_rows,
            max_model_len: 8192,
        };
        let capacity = Capacity::new(&bounds);
        let sizes = shape.sizes();
        (capacity.widened(&sizes), capacity.quantised_rows(&sizes), capacity.code_sums(&sizes))
    };
    let sums = |stride| CodeSums { n_groups: 112, stride };
    assert_eq!(of(255, fastest), ((0, 0), (255 * 14336, 255), sums(1024)));
    assert_eq!(of(256, fastest), ((28672 * 4096, 28672), (256 * 14336, 256), sums(1024)));
    let invariant = of(8150, SplitPolicy::fixed(8192, 264));
    assert_eq!(
        invariant,
        ((0, 0), (8150 * 14336, 8150), sums(8192)),
        "all rows are beside codes, and none are widened"
    );
}

#[test]
fn a_chip_or_a_width_that_e4m3_is_not_for_is_refused_with_what_would_run() {
    let of = |capability, changes| {
        let h200 = Chip::of_table("NVIDIA H200", Numerics::Fastest).unwrap().properties();
        let spec = spec("LlamaForCausalLM", changes);
        let shape = ModelShape::of(&spec, Rank::ALONE).unwrap();
        shape.stored_as_described(&spec, Properties { capability, ..h200 }, Some(Quantization::Fp8)).unwrap_err()
    };
    assert_eq!(
        of((8, 0), json!({})),
        "quantization fp8 needs a GPU of compute capability 9.0 (H100, H200, GH200), this one has 8.0: leave it out"
    );
    assert_eq!(
        of((9, 0), json!({"intermediate_size": 14328})),
        "quantization fp8 takes rows of multiples of 16 values, this model has rows of 14328: leave it out"
    );
}

#[test]
fn weights_in_e4m3_take_the_bytes_that_their_numbers_and_scales_have() {
    let llama = |quantization| {
        let of = ("LlamaForCausalLM", json!({}));
        resolved(of, Numerics::Fastest, Rank::ALONE, quantization).1.sizes().weights_bytes(1_000_000_000)
    };
    let saved = llama(None) - llama(Some(Quantization::Fp8));
    // Of a layer: qkv 6144 x 4096, o 4096 x 4096, gate and up 28672 x 4096, down 4096 x 14336.
    let (values, rows) = (6144 * 4096 + 4096 * 4096 + 28672 * 4096 + 4096 * 14336, 6144 + 4096 + 28672 + 4096);
    assert_eq!(saved, 2 * (values - 4 * rows));
}

#[test]
fn a_batch_invariant_step_is_the_same_program_at_every_row_count() {
    let llama = programs("LlamaForCausalLM", json!({}), Numerics::BatchInvariant);
    let [one, ten, many] = [1, 10, 4096].map(|n| brief(&llama.body(n).ops));
    assert_eq!((&one, &one), (&ten, &many));
    assert!(!one.contains("Update") && !one.contains("Sum"), "{one}");
}

/// The program of each stage of a model.
fn of_stages(architecture: &str, changes: Value, n_stages: usize, rank: Rank) -> Vec<Programs> {
    let chip = Chip::of_table("NVIDIA H200", Numerics::Fastest).unwrap();
    let whole = spec(architecture, changes);
    let programs = |stage| {
        let shape = ModelShape::of(&whole.staged(stage), rank).unwrap();
        Programs::new(&shape, &chip, RowLimits { max_sampled: 256, max_rows: 8192 })
    };
    Stage::all(n_stages).map(programs).collect()
}

#[test]
fn a_stage_hands_over_a_residual_with_everything_added_to_it() {
    let llama = of_stages("LlamaForCausalLM", json!({}), 2, Rank::ALONE);
    let layer = "norm Qkv:Bf16 rope attend O:Update scaled-GateUp:Gated Down:Bf16 add+.";
    check(&llama[0], 8, &format!("embed {layer}"), "");
    check(&llama[1], 8, "norm Qkv:Bf16 rope", "attend O:Update scaled-GateUp:Gated Down:Update norm Head:F32 draw");
    let many = brief(&llama[0].body(64).ops);
    assert!(many.ends_with("add+norm GateUp:Gated Down:Bf16 add+."), "{many}");
    // Without norms in front of layers, and with one behind each half.
    let olmo = of_stages("Olmo2ForCausalLM", json!({"num_key_value_heads": 32}), 2, Rank::ALONE);
    let handed = brief(&olmo[0].body(8).ops);
    assert!(handed.starts_with("embed Qkv-of-residual:Bf16 ") && handed.ends_with("Down:Bf16 norm+add+."), "{handed}");
    // Of ranks the sum first.
    let shared = of_stages("LlamaForCausalLM", json!({}), 2, Rank { idx: 0, of: 2 });
    let handed = brief(&shared[0].body(4096).ops);
    assert!(handed.ends_with("reduce+add+norm GateUp:Gated Down:Bf16 reduce add+."), "{handed}");
}
