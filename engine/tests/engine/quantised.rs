//! Quantised checkpoints: read as the libraries wrote them, computed as transformers does with the numbers that those libraries
//! dequantise, refused when they lie. The goldens are made by `tests/tools/make_quantised_goldens.py`, which explains their
//! fields.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use stoker_engine::{EngineLimits, LoadedModel, ModelFiles, model::describe};
use tempfile::TempDir;

use crate::{
    common,
    families::{self, Stored},
    goldens::{F32_TOLERANCE, Golden, difference},
};

const PLAIN: &str = "model-00001-of-00002.safetensors";
const QUANTISED: &str = "model-00002-of-00002.safetensors";

/// The golden of one checkpoint, and its files while a test runs.
pub(crate) struct Checkpoint {
    pub(crate) golden: Golden,
    files: TempDir,
}

/// Where the golden of a checkpoint is; of the empty name, where they all are.
pub(crate) fn directory(name: &str) -> PathBuf {
    common::checkpoint("../quantised").join(name)
}

impl Checkpoint {
    pub(crate) fn of(name: &str) -> Self {
        let golden = Golden::read(&directory(name));
        let stored = match golden.0["stored"].as_str() {
            Some("F32") => Stored::F32,
            Some("F16") => Stored::F16,
            _ => Stored::Bf16,
        };
        let files = tempfile::tempdir().unwrap();
        fs::write(files.path().join(PLAIN), families::weights(&golden.0, stored)).unwrap();
        let tokenizer = common::checkpoint("gqa-f32").join("tokenizer.json");
        fs::copy(tokenizer, files.path().join("tokenizer.json")).unwrap();
        let checkpoint = Self { golden, files };
        for (from, to) in [("config.json", "config.json"), ("quantised.safetensors", QUANTISED)] {
            fs::copy(directory(name).join(from), checkpoint.path().join(to)).unwrap();
        }
        // Which tensor an index names for a file is not asked: all of a file's are taken.
        let index = json!({"weight_map": {"plain": PLAIN, "quantised": QUANTISED}});
        fs::write(checkpoint.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
        checkpoint
    }

    pub(crate) fn path(&self) -> &Path {
        self.files.path()
    }

    fn difference(&self, rows: &str) -> f64 {
        let tokens = self.golden.tokens("/tokens");
        let limits = EngineLimits { max_model_len: Some(tokens.len() as u32), ..EngineLimits::default() };
        let mut model =
            LoadedModel::open(&common::config(self.path(), limits), &|_| {}).unwrap_or_else(|error| panic!("{error}"));
        let ours = model.executor.teacher_forced_logits(&tokens, tokens.len());
        difference(&ours, &self.golden.0[rows], &self.golden.tokens("/ids"))
    }

    fn edit_config(&self, edit: impl Fn(&mut Value)) {
        let path = self.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        edit(&mut config["quantization_config"]);
        fs::write(path, config.to_string()).unwrap();
    }

    /// Rewrites the header of the quantised tensors, and their bytes where they begin.
    fn edit_tensors(&self, edit: impl Fn(&mut Value, &mut Vec<u8>)) {
        let path = self.path().join(QUANTISED);
        let bytes = fs::read(&path).unwrap();
        let (length, rest) = bytes.split_at(8);
        let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
        let (mut header, mut data) = (serde_json::from_slice(&rest[..length]).unwrap(), rest[length..].to_vec());
        edit(&mut header, &mut data);
        let header = header.to_string();
        fs::write(path, [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()).unwrap();
    }

    /// The refusal, which must contain every part.
    fn refused_with(&self, parts: &[&str]) {
        common::refused_with(self.path(), parts);
    }
}

/// With numbers of f32 or f16: within 1e-4 of transformers, and the same greedy tokens. With bf16, within twice what rounding
/// to bf16 makes of transformers' own numbers.
fn check(name: &str) {
    let checkpoint = Checkpoint::of(name);
    let golden = &checkpoint.golden.0;
    if let Some(noise_floor) = golden["noise_floor"].as_f64() {
        let found = checkpoint.difference("rows_bf16");
        println!("{name}: {found:.1e} from transformers in bf16, noise floor {noise_floor:.1e}");
        assert!(found < 2.0 * noise_floor, "{name}: {found}");
        return;
    }
    let found = checkpoint.difference("rows");
    println!("{name}: {found:.1e} from transformers");
    assert!(found < F32_TOLERANCE, "{name}: {found}");
    let (prompt, expected) = (checkpoint.golden.tokens("/tokens")[..17].to_vec(), checkpoint.golden.tokens("/greedy"));
    let limits = EngineLimits { max_model_len: Some(128), ..EngineLimits::default() };
    let engine = common::start(checkpoint.path(), limits);
    let request = common::greedy(prompt, expected.len() as u32);
    assert_eq!(common::read_all(engine.submit(request).unwrap()).0, expected, "{name}");
}

/// What the CPU multiplies as integers: within twice what rounding to blocks of eight bits makes of transformers' own numbers,
/// which it does too, after sums of another order.
fn check_integers(name: &str) {
    let checkpoint = Checkpoint::of(name);
    let noise_floor = checkpoint.golden.0["noise_floor_8_bits"].as_f64().unwrap();
    let found = checkpoint.difference("rows");
    println!("{name}: {found:.1e} from transformers, noise floor of 8 bits {noise_floor:.1e}");
    assert!(found < 2.0 * noise_floor, "{name}: {found}");
    assert!(found > F32_TOLERANCE, "{name}: {found}: it was not multiplied as integers");
}

#[test]
fn fp8_in_blocks_with_one_scale_a_tensor_and_with_one_an_output() {
    check("fp8-block");
    check("fp8-block-bf16");
    check("fp8-block-ue8m0");
    check("fp8-block-128");
    check("fp8-tensor");
    check("fp8-tensor-static");
    check("fbgemm-fp8");
}

#[test]
fn fp8_of_compressed_tensors() {
    check("ct-fp8-channel");
    check("ct-fp8-tensor");
    check("ct-fp8-block");
}

#[test]
fn integers_of_compressed_tensors_of_eight_bits_and_packed() {
    check_integers("ct-int8");
    check("ct-int8-asym");
    check_integers("ct-w4a16");
    check("ct-w4a16-asym");
    check("ct-w4a16-channel");
    check("ct-w8a16");
    check_integers("ct-mixed");
}

#[test]
fn mxfp4_of_compressed_tensors() {
    check("ct-mxfp4");
}

#[test]
fn awq_with_groups_and_without() {
    check_integers("awq-g32");
    check_integers("awq-channel");
}

#[test]
fn gptq_in_both_formats_with_act_order_and_eight_bits() {
    check_integers("gptq-g32");
    check("gptq-act-order");
    check_integers("gptq-asym");
    // One group an output is in order, whatever the order of inputs.
    check_integers("gptq-v2-asym");
    check("gptq-8");
}

#[test]
fn four_bits_of_bitsandbytes_with_scales_as_numbers_and_as_bytes() {
    check("nf4");
    check("nf4-nested");
    check("fp4-nested");
}

#[test]
fn a_state_that_says_otherwise_and_eight_bits_of_bitsandbytes_are_refused() {
    let checkpoint = Checkpoint::of("nf4");
    checkpoint.edit_tensors(|header, data| {
        let state = format!("{Q_PROJ}.weight.quant_state.bitsandbytes__nf4");
        let at = header[state]["data_offsets"][0].as_u64().unwrap() as usize;
        let digit = at + data[at..].windows(2).position(|bytes| bytes == b"64").unwrap();
        data[digit] = b'3';
    });
    checkpoint.refused_with(&["q_proj.weight.quant_state", "expected blocks of 64 and shape [64, 64]"]);
    let checkpoint = Checkpoint::of("nf4");
    checkpoint.edit_config(|config| config["load_in_4bit"] = json!(false));
    checkpoint.refused_with(&["`load_in_4bit` is not true: of bitsandbytes four bits are read; take NF4"]);
}

/// Every golden is asked for by a test.
#[test]
fn there_is_a_test_for_each_golden() {
    let source = include_str!("quantised.rs");
    for entry in fs::read_dir(directory("")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let is_checked =
            ["check", "check_integers"].iter().any(|check| source.contains(&format!("{check}(\"{name}\")")));
        assert!(is_checked, "{name}");
    }
}

#[test]
fn a_description_says_how_each_projection_is_stored() {
    let described = |name: &str| {
        let checkpoint = Checkpoint::of(name);
        describe(&ModelFiles::Directory(checkpoint.path().to_path_buf())).unwrap()
    };
    let text = described("fp8-block");
    let q = "    q          self_attn.q_proj.weight [64, 64], e4m3, scales by block of 32 x 16, by heads of 16 outputs";
    assert!(text.contains(q), "{text}");
    assert!(text.contains("    down       mlp.down_proj.weight [64, 96], f32, by inputs"), "{text}");
    let text = described("gptq-v2-asym");
    assert!(text.contains("int4 as GPTQ packs, scales and zero points by output, inputs in any order"), "{text}");
}

/// Scales of keys and values are of no use where those are not rounded, and neither is a bias of zeros that the model has not.
#[test]
fn tensors_that_change_nothing_are_taken() {
    let checkpoint = Checkpoint::of("awq-g32");
    let add = |name: &str, value: u8| {
        checkpoint.edit_tensors(|header, data| {
            let start = data.len();
            data.extend([value; 128]);
            header[name] = json!({"dtype": "F16", "shape": [64], "data_offsets": [start, data.len()]});
        });
    };
    add("model.layers.0.self_attn.k_proj.k_scale", 1);
    add(&format!("{Q_PROJ}.bias"), 0);
    assert!(common::open(checkpoint.path()).is_ok());
    add("model.layers.0.self_attn.o_proj.bias", 1);
    checkpoint.refused_with(&["tensor model.layers.0.self_attn.o_proj.bias is not part of LlamaForCausalLM"]);
}

#[test]
fn groups_of_another_size_and_inputs_of_a_group_that_is_not_there_are_refused() {
    let checkpoint = Checkpoint::of("awq-g32");
    checkpoint.edit_config(|config| config["group_size"] = json!(64));
    checkpoint
        .refused_with(&["q_proj.scales has shape [2, 64]", "64 inputs) says [1, 64]; groups of 32 inputs would fit"]);
    let checkpoint = Checkpoint::of("gptq-act-order");
    checkpoint.edit_tensors(|header, data| {
        let at = header[format!("{Q_PROJ}.g_idx")]["data_offsets"][0].as_u64().unwrap() as usize;
        data[at] = 4;
    });
    checkpoint.refused_with(&["q_proj.g_idx names group 4, quantization_config says there are 4"]);
}

#[test]
fn packings_that_are_not_read_are_refused_by_name() {
    let with = |name: &str, field: &str, value: Value, part: &str| {
        let checkpoint = Checkpoint::of(name);
        checkpoint.edit_config(|config| config[field] = value.clone());
        checkpoint.refused_with(&["config.json: quantization_config: field", part]);
    };
    with("awq-g32", "version", json!("gemv"), "`version` is \"gemv\", expected \"gemm\"");
    with("awq-g32", "bits", json!(3), "`bits` is 3, expected 4 or 8");
    with("awq-g32", "zero_point", json!(false), "`zero_point` is false");
    with("gptq-g32", "checkpoint_format", json!("marlin"), "`checkpoint_format` is \"marlin\"");
    with("gptq-g32", "dynamic", json!({"+:.*": {"bits": 8}}), "`dynamic` has \"+:.*\"");
    with("gptq-g32", "group_size", json!("32"), "`group_size` is \"32\"");
}

#[test]
fn mxfp4_that_is_none_is_refused_with_what_it_is() {
    for (field, value, part) in [
        ("group_size", json!(16), "`group_size` is not 32"),
        ("symmetric", json!(false), "`symmetric` is false"),
        ("num_bits", json!(8), "`num_bits` is 8"),
    ] {
        let checkpoint = Checkpoint::of("ct-mxfp4");
        checkpoint.edit_config(|config| config["config_groups"]["group_0"]["weights"][field] = value.clone());
        checkpoint.refused_with(&["config_groups.group_0", part]);
    }
    let checkpoint = Checkpoint::of("ct-mxfp4");
    checkpoint.edit_tensors(|header, data| {
        let at = header[format!("{Q_PROJ}.weight_scale")]["data_offsets"][0].as_u64().unwrap() as usize;
        data[at] = u8::MAX;
    });
    checkpoint.refused_with(&["q_proj.weight_scale has a scale that is NaN"]);
}

const Q_PROJ: &str = "model.layers.0.self_attn.q_proj";

#[test]
fn a_missing_scale_is_named() {
    let checkpoint = Checkpoint::of("fp8-block");
    checkpoint.edit_tensors(|header, _| {
        let scales = header.as_object_mut().unwrap().remove(&format!("{Q_PROJ}.weight_scale_inv")).unwrap();
        header["left_over"] = scales;
    });
    checkpoint.refused_with(&["index.json", "q_proj.weight_scale_inv is missing; expected shape [2, 4]"]);
}

#[test]
fn scales_that_are_no_numbers_are_refused_before_any_weight_is_read() {
    for (value, word) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let checkpoint = Checkpoint::of("fp8-block");
        checkpoint.edit_tensors(|header, data| {
            let at = header[format!("{Q_PROJ}.weight_scale_inv")]["data_offsets"][0].as_u64().unwrap() as usize;
            data[at + 4..at + 8].copy_from_slice(&value.to_le_bytes());
        });
        let text = format!("q_proj.weight_scale_inv has a scale that is {word}");
        checkpoint.refused_with(&[QUANTISED, &text]);
    }
}

#[test]
fn scales_of_another_shape_and_codes_of_another_format_name_both() {
    let checkpoint = Checkpoint::of("fp8-block");
    checkpoint.edit_config(|config| config["weight_block_size"] = json!([16, 16]));
    checkpoint
        .refused_with(&["weight_scale_inv has shape [2, 4], quantization_config", "block of 16 x 16) says [4, 4]"]);
    let checkpoint = Checkpoint::of("fp8-tensor");
    checkpoint.edit_tensors(|header, _| header[format!("{Q_PROJ}.weight")]["dtype"] = json!("I8"));
    checkpoint.refused_with(&["q_proj.weight is I8, quantization_config", "says F8_E4M3"]);
}

#[test]
fn a_projection_that_is_not_quantised_though_the_configuration_says_so_names_the_way_out() {
    let checkpoint = Checkpoint::of("fp8-block");
    checkpoint.edit_config(|config| config["modules_to_not_convert"] = json!(["lm_head"]));
    checkpoint.refused_with(&[
        PLAIN,
        "model.layers.1.mlp.down_proj.weight is f32, quantization_config says e4m3",
        "name model.layers.1.mlp.down_proj there among the modules that are left alone",
    ]);
    let checkpoint = Checkpoint::of("fp8-block");
    checkpoint.edit_config(|config| config["modules_to_not_convert"] = json!(["lm_head", "model.layers.1"]));
    checkpoint.refused_with(&["model.layers.1", "F8_E4M3; supported: F32, BF16, F16"]);
}

#[test]
fn methods_and_settings_that_are_not_read_are_refused_by_name() {
    let with = |edit: &dyn Fn(&mut Value), parts: &[&str]| {
        let checkpoint = Checkpoint::of("ct-fp8-channel");
        checkpoint.edit_config(edit);
        checkpoint.refused_with(parts);
    };
    with(&|config| config["quant_method"] = json!("hqq"), &["quantization_config", "`quant_method` is \"hqq\"", "awq"]);
    with(&|config| config["quant_method"] = json!(null), &["`quant_method` is missing"]);
    with(&|config| config["format"] = json!("nvfp4-pack-quantized"), &["`format` is \"nvfp4-pack-quantized\""]);
    with(&|config| config["ignore"] = json!(["re:("]), &["`ignore` has", "no pattern"]);
    let weights = |config: &mut Value, field: &str, value: Value| {
        config["config_groups"]["group_0"]["weights"][field] = value;
    };
    with(&|config| weights(config, "num_bits", json!(6)), &["group_0", "`num_bits` is 6", "8 bits"]);
    with(&|config| weights(config, "strategy", json!("row")), &["`strategy` is \"row\""]);
}
