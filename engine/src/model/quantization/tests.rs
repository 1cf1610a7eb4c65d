//! Numbers of quantised projections are those of the libraries, bit by bit; damaged files are refused or hold what they say.

use std::{collections::BTreeMap, path::PathBuf};

use half::{bf16, f16};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use stoker_fit::model::quantization::{Activations, Bits, Codes, GroupIndices, PartKind, Scheme, SharedBy};
use stoker_kernels::{codes, int4::ScaleFormat};

use super::{Place, QuantisedWeight};
use crate::{
    config::ModelFiles,
    model::{
        ModelConfig, ModelSource, ModelSpec, StoredMatrix, WeightFormat, WeightStore, damage, safetensors,
        spec::{Rank, Sharding, WeightSpec},
        tensor::Tensor,
    },
};

/// A golden of `tests/tools/make_quantised_goldens.py`.
struct Golden {
    name: String,
    value: Value,
    spec: ModelSpec,
    store: WeightStore,
}

fn goldens() -> Vec<Golden> {
    let all = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens/quantised");
    let entries = all.read_dir().unwrap().map(|entry| entry.unwrap());
    let golden = |entry: std::fs::DirEntry| {
        let source = ModelSource::new(ModelFiles::Directory(entry.path()));
        let config = ModelConfig::from_json(&source.json("config.json").unwrap(), "config.json").unwrap();
        let store = safetensors::open_alone(&source, "quantised.safetensors").unwrap();
        let spec = ModelSpec::new(&config, store.format()).unwrap();
        let (name, value) = (entry.file_name().into_string().unwrap(), source.json("golden.json").unwrap());
        Golden { name, value, spec, store }
    };
    entries.map(golden).collect()
}

fn quantised(store: &WeightStore, weight: &WeightSpec, rank: Rank) -> QuantisedWeight {
    match store.matrix(weight, rank).unwrap() {
        StoredMatrix::Quantised(weight) => weight,
        StoredMatrix::Plain(_) => panic!("{} is quantised", weight.name),
    }
}

fn sha256(stored: &str, values: &[f32]) -> String {
    let bytes: Vec<u8> = match stored {
        "F32" => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        "F16" => values.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
    };
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Every quantised projection of every golden.
pub(crate) fn all_weights() -> Vec<(String, QuantisedWeight)> {
    let of_golden = |golden: Golden| {
        let weights = golden.spec.weights().filter(|weight| weight.scheme.is_some());
        let named = |weight: &WeightSpec| {
            (format!("{}: {}", golden.name, weight.name), quantised(&golden.store, weight, Rank::ALONE))
        };
        weights.map(named).collect::<Vec<_>>()
    };
    goldens().into_iter().flat_map(of_golden).collect()
}

#[test]
fn numbers_are_those_of_the_library_bit_by_bit() {
    for Golden { name, value, spec, store } in goldens() {
        let stored = value["stored"].as_str().unwrap();
        let expected: Vec<(String, String)> = serde_json::from_value(value["dequantised"].clone()).unwrap();
        let expected = BTreeMap::from_iter(expected);
        let weights = spec.weights().filter(|weight| weight.scheme.is_some());
        let found = weights.map(|weight| {
            let whole = quantised(&store, weight, Rank::ALONE);
            (weight.module().to_owned(), sha256(stored, &whole.dequantise(0..whole.n_outputs())))
        });
        assert_eq!(found.collect::<BTreeMap<_, _>>(), expected, "{name}");
    }
}

#[test]
fn what_a_rank_reads_and_some_rows_are_slices_of_the_whole() {
    for Golden { name, spec, store, .. } in goldens() {
        for weight in spec.weights().filter(|weight| weight.scheme.is_some()) {
            let whole = quantised(&store, weight, Rank::ALONE);
            let (n_outputs, n_inputs) = (whole.n_outputs(), whole.n_inputs());
            let all = whole.dequantise(0..n_outputs);
            assert_eq!(whole.dequantise(5..14), all[5 * n_inputs..14 * n_inputs], "{name}: {}", weight.name);
            let second = quantised(&store, weight, Rank { idx: 1, of: 2 });
            let found = second.dequantise(0..second.n_outputs());
            let expected: Vec<f32> = match weight.sharding {
                Sharding::Inputs { .. } => all.chunks(n_inputs).flat_map(|row| row[n_inputs / 2..].to_vec()).collect(),
                _ => all[all.len() / 2..].to_vec(),
            };
            assert_eq!(found, expected, "{name}: {}", weight.name);
            assert_eq!(second.n_bytes(), whole.n_bytes() / 2);
        }
    }
}

/// Codes, scales and zero points as a GPU keeps them stand for the same numbers, of a whole weight and of a rank's part.
#[test]
fn four_bits_of_a_rank_are_slices_of_the_whole() {
    let mut n_checked = 0;
    for Golden { name, spec, store, .. } in goldens() {
        for weight in spec.weights().filter(|weight| weight.scheme.as_ref().is_some_and(Scheme::is_int4)) {
            for rank in [Rank::ALONE].into_iter().chain(Rank::all(2)) {
                let part = quantised(&store, weight, rank);
                let Ok(group) = part.int4_group() else { continue };
                // A GPU is not given scales of more digits.
                let format = ScaleFormat::ALL.into_iter().find(|format| part.scales_fit(*format));
                let Some(format) = format else { continue };
                let codes = part.code_words().codes();
                let groups = part.int4_groups(group, format);
                let number = |(at, code): (usize, &u8)| {
                    let (row, input) = (at / part.n_inputs(), at % part.n_inputs());
                    let word = groups.of_output(row)(input / group.values());
                    let scale = match format {
                        ScaleFormat::F16 => f16::from_bits(word as u16).to_f32(),
                        ScaleFormat::Bf16 => bf16::from_bits(word as u16).to_f32(),
                    };
                    scale * (f32::from(*code) + 128.0 - bf16::from_bits((word >> 16) as u16).to_f32())
                };
                let found: Vec<f32> = codes.iter().enumerate().map(number).collect();
                assert_eq!(found, part.dequantise(0..part.n_outputs()), "{name}: {}, {rank:?}", weight.name);
                n_checked += usize::from(rank.of == 2 && part.n_inputs() < weight.tensor_shape[1]);
            }
        }
    }
    assert!(n_checked > 0, "no rank has a part of some inputs");
}

/// One of each way of storing codes, of 16 outputs and 32 inputs.
fn schemes() -> Vec<Scheme> {
    let group = SharedBy::Group(16);
    let scheme = |codes, shared, zero_points, group_indices| Scheme {
        codes,
        shared,
        zero_points,
        group_indices,
        scale_names: &["scales"],
        activations: Activations::AsTheyAre,
    };
    vec![
        scheme(Codes::E4m3, SharedBy::Block { outputs: 8, inputs: 16 }, false, GroupIndices::None),
        scheme(Codes::E4m3, SharedBy::Tensor, false, GroupIndices::None),
        scheme(Codes::Int8, SharedBy::Output, true, GroupIndices::None),
        scheme(Codes::Packed(Bits::Four), group, true, GroupIndices::Needed),
        scheme(Codes::Gptq { bits: Bits::Four, zeros_less_one: true }, group, true, GroupIndices::Needed),
        scheme(Codes::Awq, group, true, GroupIndices::None),
        scheme(Codes::Levels, group, false, GroupIndices::None),
        scheme(Codes::E2m1, group, false, GroupIndices::None),
    ]
}

/// A file with the tensors of all of them, full of ones.
fn file() -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (idx, scheme) in schemes().iter().enumerate() {
        for part in scheme.parts([16, 32]).into_iter().filter(|part| part.needed) {
            let dtype = part.dtypes[0];
            let n_values: usize = part.shapes.first().map_or(0, |shape| shape.iter().product());
            let bytes = match part.kind {
                PartKind::State => br#"{"blocksize":16,"shape":[16,32]}"#.to_vec(),
                PartKind::GroupIndices => vec![0; n_values * dtype.bitsize() / 8],
                _ => vec![1; n_values * dtype.bitsize() / 8],
            };
            let shape = part.shapes.first().cloned().unwrap_or(vec![bytes.len()]);
            let offsets = [data.len(), data.len() + bytes.len()];
            data.extend(bytes);
            let described = json!({"dtype": dtype.to_string(), "shape": shape, "data_offsets": offsets});
            header.insert(format!("m{idx}.{}", part.names[0]), described);
        }
    }
    let header = Value::from(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

fn find(
    tensors: &BTreeMap<String, Tensor>,
    idx: usize,
    scheme: &Scheme,
) -> Result<QuantisedWeight, crate::model::ModelError> {
    let module = format!("m{idx}");
    let place = Place { module: &module, shape: [16, 32], whole: "m.safetensors" };
    let slice = crate::model::spec::WeightSlice { rows: 0..16, columns: 0..32 };
    QuantisedWeight::find(scheme, &place, slice, |name| tensors.get(name))
}

/// A row of scales for eight outputs: those of the blocks that they are in, from the rank's first input on.
#[test]
fn scales_of_blocks_are_those_that_their_numbers_are_multiplied_by() {
    let golden = goldens().into_iter().find(|golden| golden.name == "fp8-block-128").unwrap();
    let mut n_seen = 0;
    for weight in golden.spec.weights().filter(|weight| weight.scheme.is_some()) {
        for rank in Rank::all(2) {
            let found = quantised(&golden.store, weight, rank);
            let Some(scales) = found.block_scales(8) else { continue };
            assert_eq!(scales.len(), 4, "whole pieces of 16 bytes");
            let codes = found.row_of_bytes(8).iter().map(|code| codes::e4m3(*code));
            let scaled: Vec<f32> = codes.enumerate().map(|(at, number)| number * scales[at / 128]).collect();
            assert_eq!(scaled, found.dequantise(8..9), "{} of {rank:?}", weight.name);
            assert!(scales[..found.n_inputs().div_ceil(128)].iter().all(|scale| *scale > 0.0));
            n_seen += 1;
        }
    }
    assert_eq!(n_seen, 2 * 14);
    // Blocks of 32 x 16.
    let other = goldens().into_iter().find(|golden| golden.name == "fp8-block").unwrap();
    let weight = other.spec.weights().find(|weight| weight.scheme.is_some()).unwrap();
    assert_eq!(quantised(&other.store, weight, Rank::ALONE).block_scales(0), None);
}

/// The library that packs so has dropped this order of inputs; checkpoints that it made with it are there.
#[test]
fn packed_inputs_in_any_order_take_the_scale_and_zero_point_of_their_group() {
    let mut bytes = file();
    let header_end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..header_end]).unwrap();
    let mut write = |name: &str, values: &[u32]| {
        let at = header_end + header[name]["data_offsets"][0].as_u64().unwrap() as usize;
        let new: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        bytes[at..at + new.len()].copy_from_slice(&new);
    };
    write("m3.weight_g_idx", &[0, 1].repeat(16));
    write("m3.scales", &[0.5f32, 4.0].map(f32::to_bits).repeat(16));
    // Codes 0 to 7 less half their range, in every word; zero points 1 and 2 less half.
    write("m3.weight_packed", &[0x7654_3210; 64]);
    write("m3.weight_zero_point", &[0x1111_1111, 0x2222_2222].repeat(2));
    let weight = find(&safetensors::read_bytes(bytes).unwrap(), 3, &schemes()[3]).unwrap();
    let eight = [-0.5, -4.0, 0.5, 4.0, 1.5, 12.0, 2.5, 20.0];
    assert_eq!(weight.dequantise(15..16), eight.repeat(4));
    assert_eq!(weight.kept_as(WeightFormat::F16), WeightFormat::F16, "no block has one scale");
}

#[test]
fn damaged_files_are_refused_or_hold_what_they_say() {
    let whole = safetensors::read_bytes(file()).unwrap();
    for (idx, scheme) in schemes().iter().enumerate() {
        assert_eq!(find(&whole, idx, scheme).unwrap().dequantise(0..16).len(), 16 * 32, "{scheme}");
    }
    damage::read_all(&file(), |case, damaged| {
        let Ok(tensors) = safetensors::read_bytes(damaged) else { return };
        for (idx, scheme) in schemes().iter().enumerate() {
            if let Ok(weight) = find(&tensors, idx, scheme) {
                assert_eq!(weight.dequantise(0..1).len(), 32, "case {case}");
            }
        }
    });
}
