//! How the weights of a benchmark are quantised: as an engine quantises them when it loads them, or as a description says that they
//! are stored, of which random ones are drawn. Measures nothing.

use std::str::FromStr;

use serde_json::{Value, json};
use stoker_engine::Quantization;

/// A kind of quantised weights.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Quantised {
    /// Made by the engine when it loads them.
    AtStart(Quantization),
    /// Four bits in groups of 128 with zero points, as AutoAWQ publishes them. Random codes, scales and zero points, made on the GPU: no
    /// engine makes them of other weights.
    Int4,
}

impl Quantised {
    /// As users and figures write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::AtStart(quantization) => quantization.name(),
            Self::Int4 => "int4",
        }
    }

    /// What the engine is asked to do.
    pub fn at_start(self) -> Option<Quantization> {
        match self {
            Self::AtStart(quantization) => Some(quantization),
            Self::Int4 => None,
        }
    }

    /// Says in a model's description how its weights are stored.
    pub(crate) fn describe(self, config: &mut Value) {
        if self == Self::Int4 {
            config["quantization_config"] = json!({
                "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm",
            });
        }
    }
}

impl FromStr for Quantised {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known = || Quantization::ALL.into_iter().map(Self::AtStart).chain([Self::Int4]);
        let names = || known().map(Self::name).collect::<Vec<_>>().join(" or ");
        known().find(|kind| kind.name() == name).ok_or_else(|| format!("{name:?} is not known: take {}", names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_what_is_written_and_only_stored_ones_are_described() {
        for name in ["fp8", "int4"] {
            let kind: Quantised = name.parse().unwrap();
            let mut config = json!({});
            kind.describe(&mut config);
            assert_eq!((kind.name(), kind.at_start().is_none()), (name, config != json!({})));
        }
        assert_eq!("int3".parse::<Quantised>().unwrap_err(), "\"int3\" is not known: take fp8 or int4");
    }
}
