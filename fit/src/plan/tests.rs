//! Published models on cards that can be bought: sizes as their publishers count them, and changes that are enough.

use std::{fs, path::Path};

use serde_json::{Value, json};

use super::*;
use crate::gpu::{CARDS, GroupSize, LayerFormats};

/// Fields of published configurations, and how many parameters their publishers count.
fn published(name: &str) -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/goldens/specs/{name}.json"));
    let config: Value = serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    Model::from_json(&config, "config.json").unwrap()
}

fn card(name: &str) -> Place {
    Place::Gpu(Card::named(name).unwrap())
}

/// The fields of `config.json` that sizes depend on, as published with the models.
fn llama(hidden: usize, inner: usize, layers: usize, heads: [usize; 2]) -> Value {
    json!({"architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 128,
        "vocab_size": 128_256, "max_position_embeddings": 131_072, "tie_word_embeddings": false})
}

fn qwen2(hidden: usize, inner: usize, layers: usize, heads: [usize; 2], vocab: usize, tied: bool) -> Value {
    json!({"architectures": ["Qwen2ForCausalLM"], "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1],
        "vocab_size": vocab, "max_position_embeddings": 32_768, "tie_word_embeddings": tied})
}

fn qwen3(hidden: usize, inner: usize, layers: usize, heads: [usize; 2], tied: bool) -> Value {
    json!({"architectures": ["Qwen3ForCausalLM"], "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 128,
        "vocab_size": 151_936, "max_position_embeddings": 40_960, "tie_word_embeddings": tied})
}

fn model(config: &Value) -> Model {
    Model::from_json(config, "config.json").unwrap()
}

#[test]
fn parameters_are_as_many_as_the_publishers_count() {
    let small_llama = |hidden, inner, layers, heads| {
        let mut config = llama(hidden, inner, layers, heads);
        config["tie_word_embeddings"] = json!(true);
        config["head_dim"] = json!(hidden / heads[0]);
        config
    };
    let counted = [
        ("Llama-3.2-1B", small_llama(2048, 8192, 16, [32, 8]), 1_235_814_400),
        ("Llama-3.2-3B", small_llama(3072, 8192, 28, [24, 8]), 3_212_749_824),
        ("Llama-3.1-8B", llama(4096, 14_336, 32, [32, 8]), 8_030_261_248),
        ("Llama-3.1-70B", llama(8192, 28_672, 80, [64, 8]), 70_553_706_496),
        ("Llama-3.1-405B", llama(16_384, 53_248, 126, [128, 8]), 405_853_388_800),
        ("Qwen2.5-0.5B", qwen2(896, 4864, 24, [14, 2], 151_936, true), 494_032_768),
        ("Qwen2.5-7B", qwen2(3584, 18_944, 28, [28, 4], 152_064, false), 7_615_616_512),
        ("Qwen2.5-14B", qwen2(5120, 13_824, 48, [40, 8], 152_064, false), 14_770_033_664),
        ("Qwen2.5-32B", qwen2(5120, 27_648, 64, [40, 8], 152_064, false), 32_763_876_352),
        ("Qwen2.5-72B", qwen2(8192, 29_568, 80, [64, 8], 152_064, false), 72_706_203_648),
        ("Qwen3-0.6B", qwen3(1024, 3072, 28, [16, 8], true), 596_049_920),
        ("Qwen3-4B", qwen3(2560, 9728, 36, [32, 8], true), 4_022_468_096),
        ("Qwen3-8B", qwen3(4096, 12_288, 36, [32, 8], false), 8_190_735_360),
        ("Qwen3-14B", qwen3(5120, 17_408, 40, [40, 8], false), 14_768_307_200),
        ("Qwen3-32B", qwen3(5120, 25_600, 64, [64, 8], false), 32_762_123_264),
    ];
    for (name, config, n_params) in counted {
        assert_eq!(model(&config).spec.n_params(), n_params, "{name}");
    }
    let published = |name| published(name).spec.n_params();
    assert_eq!(published("gemma-2-9b"), 9_241_705_984);
    assert_eq!(published("gemma-3-1b"), 999_885_952);
    assert_eq!(published("phi-4"), 14_659_507_200);
    assert_eq!(published("mistral-7b-v0.1"), 7_241_732_096);
}

#[test]
fn a_prompt_takes_two_operations_a_number_and_row_and_four_a_number_seen() {
    let flop = |config, n_tokens| model(&config).spec.prompt_flop(n_tokens);
    let layer = 2.0 * 4096.0 * 4096.0 + 2.0 * 4096.0 * 1024.0 + 3.0 * 4096.0 * 14_336.0;
    let head = 2.0 * 128_256.0 * 4096.0;
    // Three tokens see one, two and three.
    assert_eq!(flop(llama(4096, 14_336, 32, [32, 8]), 3), 32.0 * (2.0 * 3.0 * layer + 4.0 * 4096.0 * 6.0) + head);
    // Layers with a window see no more than it: of its 32 Mistral's all see 4,096.
    let mistral = published("mistral-7b-v0.1");
    let beyond = mistral.spec.prompt_flop(8193) - mistral.spec.prompt_flop(8192);
    assert_eq!(beyond, 32.0 * (2.0 * layer + 4.0 * 4096.0 * 4096.0));
}

#[test]
fn keys_and_values_of_a_token_are_two_of_every_layer_and_kv_head() {
    let bytes = |name: &str| plan(&published(name), &Asked::default(), card("H200")).unwrap().memory.kv_bytes_per_token;
    // 2 x layers x KV heads x width x 2 bytes.
    assert_eq!(bytes("llama-3.1-8b"), 2 * 32 * 8 * 128 * 2);
    assert_eq!(bytes("gemma-2-9b"), 2 * 42 * 8 * 256 * 2);
    assert_eq!(bytes("qwen2.5-7b"), 2 * 28 * 4 * 128 * 2);
    assert_eq!(bytes("phi-4"), 2 * 40 * 10 * 128 * 2);
}

#[test]
fn what_is_known_to_fit_fits_and_what_is_known_not_to_does_not() {
    let fits = |name: &str, on: &str, asked: Asked| plan(&published(name), &asked, card(on)).is_ok();
    let short = Asked { max_model_len: Some(8192), ..Asked::default() };
    assert!(fits("llama-3.1-8b", "H200", Asked::default()));
    assert!(fits(
        "llama-3.1-8b",
        "L4",
        Asked {
            max_model_len: Some(4096),
            sizes: AskedSizes { max_num_seqs: Some(32), max_batched_tokens: Some(2048) },
            ..short
        }
    ));
    assert!(!fits("llama-3.1-8b", "T4", short));
    let large = model(&llama(8192, 28_672, 80, [64, 8]));
    let on = |n_ranks, fp8| plan(&large, &Asked { n_ranks, fp8, ..short }, card("H100-80GB")).is_ok();
    // In bf16 on two of them it has taken prompts of 8,192 tokens (docs/benchmarks/NOTES.md).
    assert_eq!([on(1, false), on(2, false), on(4, false), on(1, true), on(2, true)], [false, true, true, false, true]);
    let h200 = |n_ranks| plan(&large, &Asked { n_ranks, ..short }, card("H200")).is_ok();
    assert_eq!([h200(1), h200(2)], [false, true]);
    assert!(
        plan(&model(&llama(16_384, 53_248, 126, [128, 8])), &Asked { n_ranks: 8, fp8: true, ..short }, card("H100"))
            .is_ok()
    );
}

/// The embedding table is the first stage's, the head the last one's; all weights are some stage's, tied ones that of both.
#[test]
fn stages_hold_the_model_once() {
    for (name, shared) in [("llama-3.1-8b", 0), ("gemma-3-1b", 262_144 * 1152), ("olmo2-7b", 0)] {
        let model = published(name);
        for n_stages in [2, 3, 8] {
            let of_stage = |stage| model.spec.staged(stage).n_params();
            let all: u64 = Stage::all(n_stages).map(of_stage).sum();
            assert_eq!(all, model.spec.n_params() + shared, "{name}: {n_stages} stages");
        }
    }
    let asked = |n_stages| Asked { n_stages, max_model_len: Some(8192), ..Asked::default() };
    let large = model(&llama(8192, 28_672, 80, [64, 8]));
    let on_h200 = |n_stages| plan(&large, &asked(n_stages), card("H200"));
    assert!(on_h200(1).is_err());
    let fit = on_h200(2).unwrap();
    assert_eq!((fit.n_gpus, fit.memory.kv_bytes_per_token), (2, 2 * 40 * 8 * 128 * 2));
    let with_ranks = plan(&large, &Asked { n_ranks: 2, ..asked(2) }, card("H100-80GB")).unwrap();
    assert_eq!(with_ranks.n_gpus, 4);
}

#[test]
fn a_model_that_ranks_do_not_divide_is_offered_stages_and_no_more_than_it_has_layers() {
    let olmo = published("olmo2-7b");
    let asked = Asked { max_model_len: Some(4096), ..Asked::default() };
    let advised = remedies(&olmo, &asked, card("T4"));
    assert!(advised.contains(&Remedy::Stages(2)), "{advised:?}");
    assert!(!advised.iter().any(|remedy| matches!(remedy, Remedy::Ranks(_))), "{advised:?}");
    let of_ranks = remedies(&olmo, &Asked { n_ranks: 2, ..asked }, card("T4"));
    assert!(of_ranks.contains(&Remedy::StagesAlone(2)), "{of_ranks:?}");
    let mut shallow = llama(4096, 14_336, 3, [32, 8]);
    shallow["vocab_size"] = json!(1000);
    let refused =
        |n_stages| plan(&model(&shallow), &Asked { n_stages, ..asked }, card("H200")).unwrap_err().to_string();
    assert_eq!(refused(4), "4 stages of a pipeline are more than the model's 3 layers: take at most as many");
    assert_eq!([refused(0), refused(9)], ["0 stages are not 1 to 8", "9 stages are not 1 to 8"]);
}

#[test]
fn codes_that_a_cpu_does_not_multiply_take_the_memory_of_plain_numbers_there() {
    // Bytes of 32 weights: blocks of eight bits, of four, or numbers of two bytes.
    let (eight, four, plain) = (34, 18, 64);
    for (name, expected) in [
        ("ct-fp8-channel", plain),
        ("fp8-block", plain),
        ("nf4", plain),
        ("ct-mxfp4", plain),
        ("gptq-act-order", plain),
        ("ct-int8", eight),
        ("ct-int8-asym", plain),
        ("ct-w8a16", plain),
        ("ct-w4a16", four),
        ("ct-w4a16-asym", plain),
        ("ct-w4a16-channel", eight),
        ("awq-g32", eight),
        ("gptq-g32", eight),
    ] {
        let path = format!("{}/../tests/goldens/quantised/{name}/config.json", env!("CARGO_MANIFEST_DIR"));
        let mut config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        config["dtype"] = json!("bfloat16");
        let model = model(&config);
        let [mut quantised, mut others] = [0, 0];
        for weight in model.spec.weights() {
            *(if weight.scheme.is_some() { &mut quantised } else { &mut others }) += weight.n_values();
        }
        assert!(quantised > others / 2, "{name}");
        assert_eq!(model.host_bytes(), 2 * others + quantised * expected / 32, "{name}");
    }
}

#[test]
fn eight_bits_halve_the_projections_and_the_cache() {
    let of = |asked| plan(&published("llama-3.1-8b"), &asked, card("H200")).unwrap().memory;
    let (plain, fp8) = (of(Asked::default()), of(Asked { fp8: true, kv_format: KvFormat::E4m3, ..Asked::default() }));
    // As an H200 said when it loaded it: 16.1 and 9.1 GB.
    assert_eq!(plain.weights_bytes / 10_000_000, 1606);
    assert_eq!(fp8.weights_bytes / 100_000_000, 90);
    assert_eq!(fp8.kv_bytes_per_token * 2, plain.kv_bytes_per_token);
    assert!(fp8.kv_tokens() > 2 * plain.kv_tokens());
}

#[test]
fn blocks_of_eight_bits_stay_what_they_are_where_every_rank_has_them_whole() {
    let in_blocks = |mut config: Value, block: [u32; 2]| {
        config["quantization_config"] =
            json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block});
        model(&config)
    };
    let stored = |model: &Model, of| {
        let layers = layer_formats(&model.spec, Rank::all(of).last().unwrap(), (9, 0), false).unwrap();
        let first = layers[0];
        assert!(layers.iter().all(|layer| *layer == first));
        first
    };
    let (blocks, plain) = (LayerFormats::all(WeightFormat::E4m3Blocks), LayerFormats::all(WeightFormat::Bf16));
    let llama = in_blocks(llama(4096, 14_336, 32, [32, 8]), [128, 128]);
    assert_eq!([1, 2, 4, 8].map(|of| stored(&llama, of)), [blocks; 4]);
    // 9728 inputs are 76 blocks, and 9.5 of one of eight ranks: outputs are cut at eights.
    let qwen = in_blocks(qwen3(2560, 9728, 36, [32, 8], true), [128, 128]);
    let cut = LayerFormats { down: WeightFormat::Bf16, ..blocks };
    assert_eq!([1, 4, 8].map(|of| stored(&qwen, of)), [blocks, blocks, cut]);
    assert_eq!(stored(&in_blocks(qwen3(2560, 9728, 36, [32, 8], true), [64, 64]), 1), plain);
    // The last of three has whole blocks of 576 inputs, the others have not.
    assert_eq!(stored(&in_blocks(qwen3(2304, 576, 4, [6, 3], true), [128, 128]), 3), cut);
    for fp8 in [false, true] {
        let asked = Asked { fp8, ..Asked::default() };
        let fit = plan(&llama, &asked, card("H200")).unwrap();
        // A byte a number, and 4 for each 1024.
        let projections = 32 * (6144 + 4096 + 28_672 + 14_336) as u64 * 4096;
        let expected = 2 * (fit.n_params - projections) + projections + projections / 256;
        assert_eq!((fit.formats, fit.memory.weights_bytes), ([WeightFormat::E4m3Blocks].into(), expected));
    }
    assert_eq!(plan(&llama, &Asked::default(), card("A100-80GB")).unwrap().formats, [WeightFormat::Bf16].into());
}

#[test]
fn what_a_checkpoint_leaves_alone_or_quantises_otherwise_takes_its_own_format_and_no_other() {
    let of = |mut config: Value, quantization: Value, fp8| {
        config["quantization_config"] = quantization;
        let spec = model(&config).spec;
        layer_formats(&spec, Rank::ALONE, (9, 0), fp8)
    };
    let narrow = || llama(1024, 2048, 3, [16, 4]);
    let (bf16, e4m3, int4) = (WeightFormat::Bf16, WeightFormat::E4m3, WeightFormat::Int4(GroupSize::G128));
    let awq = |left: Value| {
        json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm",
        "modules_to_not_convert": left})
    };
    let whole = LayerFormats::all(int4);
    // The first layer, as many publish it; and a half of what lies in one matrix.
    let first = of(narrow(), awq(json!(["model.layers.0."])), false).unwrap();
    assert_eq!(first, [LayerFormats::all(bf16), whole, whole]);
    let half = of(narrow(), awq(json!(["k_proj", "layers.2.mlp.down_proj"])), false).unwrap();
    let without_k = LayerFormats { qkv: bf16, ..whole };
    assert_eq!(half, [without_k, without_k, LayerFormats { down: bf16, ..without_k }]);
    // With a byte at the most for each number, what was left alone is quantised too.
    assert_eq!(of(narrow(), awq(json!(["k_proj"])), true).unwrap(), [LayerFormats::all(e4m3); 3]);
    let weights = |bits: u32, kind: &str, rest: Value| {
        let mut weights = json!({"num_bits": bits, "type": kind, "symmetric": true});
        weights.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        weights
    };
    let mixed = json!({"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ["lm_head"], "config_groups": {
        "group_0": {"targets": ["re:.*self_attn.*"], "format": "float-quantized",
            "weights": weights(8, "float", json!({"strategy": "channel"}))},
        "group_1": {"targets": ["re:.*mlp.*"], "format": "pack-quantized",
            "weights": weights(4, "int", json!({"strategy": "group", "group_size": 32}))}}});
    let narrow_groups = WeightFormat::Int4(GroupSize::G32);
    let expected = LayerFormats { qkv: e4m3, o: e4m3, gate_up: narrow_groups, down: narrow_groups };
    assert_eq!(of(narrow(), mixed, false).unwrap(), [expected; 3]);
}

#[test]
fn each_format_of_a_mixture_takes_its_own_bytes() {
    let mut config = llama(4096, 14_336, 32, [32, 8]);
    let whole = model(&config);
    let of = |model: &Model| plan(model, &Asked::default(), card("H200")).unwrap();
    let plain = of(&whole).memory.weights_bytes;
    config["quantization_config"] = json!({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true,
        "version": "gemm", "modules_to_not_convert": ["model.layers.0."]});
    let fit = of(&model(&config));
    let n_layer = (6144 + 4096 + 28_672 + 14_336) as u64 * 4096;
    let [two_bytes, half] = [2 * n_layer, n_layer / 2 + n_layer / 128 * 4];
    assert_eq!(fit.memory.weights_bytes, plain - 31 * (two_bytes - half));
    assert_eq!(fit.formats, [WeightFormat::Bf16, WeightFormat::Int4(GroupSize::G128)].into());
}

#[test]
fn formats_that_the_chip_lacks_are_refused_and_not_advised() {
    let asked = Asked { fp8: true, ..Asked::default() };
    let refused = plan(&published("llama-3.1-8b"), &asked, card("A100-80GB")).unwrap_err();
    assert!(refused.to_string().contains("compute capability 9.0"), "{refused}");
    let advised = remedies(&model(&llama(8192, 28_672, 80, [64, 8])), &Asked::default(), card("A100-80GB"));
    assert!(!advised.is_empty() && !advised.contains(&Remedy::Fp8), "{advised:?}");
}

#[test]
fn the_nearest_changes_are_said_in_order() {
    let advised = remedies(&published("llama-3.1-8b"), &Asked::default(), card("L4"));
    let text = RemedyText(&advised).to_string();
    assert!(text.starts_with("needs 2 GPUs (parallelism.tensor: 2), or "), "{text}");
    assert!(text.contains(" tokens (engine.maxModelLen: "), "{text}");
}

/// Every model, card, context and number of ranks that a person may write.
fn questions() -> impl Iterator<Item = (Model, Asked, Place)> {
    let models = [
        "llama-3.1-8b",
        "qwen2.5-7b",
        "qwen3-8b",
        "gemma-2-9b",
        "gemma-3-1b",
        "phi-4",
        "mistral-7b-v0.1",
        "olmo2-7b",
        "smollm3-3b",
    ];
    let large = [llama(8192, 28_672, 80, [64, 8]), llama(16_384, 53_248, 126, [128, 8])];
    let models: Vec<Model> = models.iter().map(|name| published(name)).chain(large.iter().map(model)).collect();
    let gpus = CARDS.iter().step_by(2).map(|card| Place::Gpu(*card));
    let hosts = [1, 4, 16, 64].map(|gib| Place::Host { limit_bytes: gib << 30 });
    let places: Vec<Place> = gpus.chain(hosts).collect();
    models.into_iter().flat_map(move |model| {
        let lens = [None, Some(2048)];
        let asked = lens
            .into_iter()
            .flat_map(|max_model_len| [1, 2].map(|n_ranks| Asked { max_model_len, n_ranks, ..Asked::default() }));
        let asked: Vec<Asked> = asked.flat_map(|asked| [1, 3].map(|n_stages| Asked { n_stages, ..asked })).collect();
        let places = places.clone();
        places.into_iter().flat_map(move |place| {
            let model = model.clone();
            asked.clone().into_iter().map(move |asked| (model.clone(), asked, place))
        })
    })
}

#[test]
fn every_change_that_is_said_is_enough_and_what_fits_is_left_alone() {
    let (mut n_fits, mut n_remedies, mut n_hopeless) = (0, 0, 0);
    for (model, asked, place) in questions() {
        let advised = remedies(&model, &asked, place);
        if plan(&model, &asked, place).is_ok() {
            n_fits += 1;
            assert_eq!(advised, []);
            continue;
        }
        n_hopeless += usize::from(advised.is_empty());
        for remedy in advised {
            n_remedies += 1;
            let (mut asked, mut place) = (asked, place);
            remedy.apply(&mut asked, &mut place);
            let fixed = plan(&model, &asked, place);
            assert!(fixed.is_ok(), "{} {asked:?} on {place:?} with {remedy:?}: {fixed:?}", model.spec.architecture);
        }
    }
    assert!(n_fits > 100 && n_remedies > 100, "{n_fits} fit, {n_remedies} changes, {n_hopeless} without");
}

#[test]
fn a_plan_never_hands_out_more_than_there_is() {
    for (model, asked, place) in questions() {
        let (Ok(fit), Place::Gpu(card)) = (plan(&model, &asked, place), place) else { continue };
        let MemoryPlan { weights_bytes, workspace_bytes, kv_bytes, .. } = fit.memory;
        let used = weights_bytes + workspace_bytes + kv_bytes + card.taken_bytes();
        assert!(used as f64 <= card.given_bytes() as f64 * asked.memory_fraction, "{fit:?} on {card:?}");
        assert!(fit.memory.kv_tokens() >= fit.max_model_len as u64, "{fit:?}");
    }
}
