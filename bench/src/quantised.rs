//! How the weights of a benchmark are quantised: as an engine quantises them when it loads them, or as a description says that they
//! are stored, of which random ones are drawn. Measures nothing.

use std::str::FromStr;

use serde_json::{Value, json};
use stoker_engine::Quantization;

use crate::shape::{Fill, Tensor};

/// A kind of quantised weights.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Quantised {
    /// Made by the engine when it loads them.
    AtStart(Quantization),
    /// Four bits in groups of 128 with zero points, as AutoAWQ publishes them. Random codes: no engine makes them of other weights.
    Int4,
    /// e4m3 with a scale an output, as compressed-tensors publishes them for rows that are quantised as they come. Random codes, on disk.
    Fp8Stored,
    /// e4m3 with a scale for each 128 outputs and 128 inputs, as DeepSeek and Qwen publish them. Random codes.
    Fp8Blocks,
}

/// Outputs and inputs that share a scale in e4m3.
const BLOCK: u32 = 128;
/// Inputs that share a scale in four bits.
const GROUP: u32 = 128;

impl Quantised {
    /// As users and figures write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::AtStart(quantization) => quantization.name(),
            Self::Int4 => "int4",
            Self::Fp8Stored => "fp8-stored",
            Self::Fp8Blocks => "fp8-blocks",
        }
    }

    /// What the engine is asked to do.
    pub fn at_start(self) -> Option<Quantization> {
        match self {
            Self::AtStart(quantization) => Some(quantization),
            Self::Int4 | Self::Fp8Stored | Self::Fp8Blocks => None,
        }
    }

    /// Says in a model's description how its weights are stored.
    pub(crate) fn describe(self, config: &mut Value) {
        config["quantization_config"] = match self {
            Self::AtStart(_) => return,
            Self::Int4 => json!({
                "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": true, "version": "gemm",
            }),
            Self::Fp8Blocks => json!({
                "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK],
            }),
            Self::Fp8Stored => {
                let of = |strategy, dynamic| json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy, "dynamic": dynamic});
                json!({
                    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
                    "config_groups": {"group_0": {
                        "targets": ["Linear"], "weights": of("channel", false), "input_activations": of("token", true),
                    }},
                })
            }
        };
    }

    /// The tensors that stand for one of a checkpoint.
    pub(crate) fn stored(self, tensor: Tensor) -> Vec<Tensor> {
        let Some(module) = tensor.name.strip_suffix(".weight").filter(|name| name.ends_with("_proj")) else {
            return vec![tensor];
        };
        let [outputs, inputs] = tensor.shape[..] else { return vec![tensor] };
        let part = |name: &str, shape: [u32; 2], fill| Tensor {
            name: format!("{module}.{name}"),
            shape: shape.to_vec(),
            fill,
        };
        match self {
            Self::AtStart(_) => vec![tensor],
            Self::Int4 => vec![
                part("qweight", [inputs, outputs / 8], Fill::Fours),
                part("qzeros", [inputs.div_ceil(GROUP), outputs / 8], Fill::Fours),
                part("scales", [inputs.div_ceil(GROUP), outputs], Fill::Scale),
            ],
            Self::Fp8Blocks => vec![
                part("weight", [outputs, inputs], Fill::E4m3),
                part("weight_scale_inv", [outputs.div_ceil(BLOCK), inputs.div_ceil(BLOCK)], Fill::Scale),
            ],
            Self::Fp8Stored => {
                vec![part("weight", [outputs, inputs], Fill::E4m3), part("weight_scale", [outputs, 1], Fill::Scale)]
            }
        }
    }
}

impl FromStr for Quantised {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known =
            || Quantization::ALL.into_iter().map(Self::AtStart).chain([Self::Int4, Self::Fp8Stored, Self::Fp8Blocks]);
        let names = || known().map(Self::name).collect::<Vec<_>>().join(" or ");
        known().find(|kind| kind.name() == name).ok_or_else(|| format!("{name:?} is not known: take {}", names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_what_is_written_and_only_stored_ones_are_described() {
        for name in ["fp8", "int4", "fp8-stored", "fp8-blocks"] {
            let kind: Quantised = name.parse().unwrap();
            let mut config = json!({});
            kind.describe(&mut config);
            assert_eq!((kind.name(), kind.at_start().is_none()), (name, config != json!({})));
        }
        assert_eq!(
            "int3".parse::<Quantised>().unwrap_err(),
            "\"int3\" is not known: take fp8 or int4 or fp8-stored or fp8-blocks"
        );
    }
}
