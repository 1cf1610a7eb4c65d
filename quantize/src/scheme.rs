//! What a checkpoint becomes: formats, methods, and how `config.json` says so. Pure.

use std::{fmt, str::FromStr};

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

/// How projections are stored.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Format {
    /// e4m3 with a scale an output; rows that enter are quantised as they come, each with a scale of its own (W8A8).
    Fp8,
    /// e4m3 with a scale an output; what enters has one scale, measured on the calibration text.
    Fp8Static,
    /// int8 with a scale an output; rows that enter are quantised as they come (W8A8).
    Int8,
    /// int4 with a scale for each group of inputs; what enters stays as it is (W4A16).
    Int4,
}

/// How numbers become codes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Method {
    /// Each becomes the nearest of the format.
    Nearest,
    /// Inputs that matter are made larger before (Lin et al. 2023, arXiv:2306.00978).
    Awq,
    /// What rounding one input does is made up for by those after it (Frantar et al. 2022, arXiv:2210.17323).
    Gptq,
    /// Part of the inputs' size is moved into the weights, since both are rounded (Xiao et al. 2022, arXiv:2211.10438).
    SmoothQuant,
}

/// All of it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Scheme {
    /// What is stored.
    pub format: Format,
    /// How it is found.
    pub method: Method,
    /// Inputs that share a scale; of int4 only.
    pub group: usize,
}

impl Scheme {
    /// Refuses pairs that make no sense.
    pub fn check(&self) -> Result<()> {
        match (self.format, self.method) {
            (_, Method::Nearest) | (Format::Int4, Method::Awq | Method::Gptq) | (Format::Int8, Method::SmoothQuant) => {
            }
            (format, method) => bail!("--method {method} is not for --format {format}: {}", suited(format)),
        }
        let is_packed = self.group > 0 && self.group.is_multiple_of(32);
        ensure!(
            self.format != Format::Int4 || is_packed,
            "--group is {}: take a multiple of 32, such as 128",
            self.group
        );
        Ok(())
    }

    /// Whether it is found on texts.
    pub fn is_calibrated(&self) -> bool {
        self.method != Method::Nearest || self.format == Format::Fp8Static
    }

    /// Inputs of a matrix of `n_inputs` that share a scale.
    pub fn group_of(&self, n_inputs: usize) -> usize {
        if self.format == Format::Int4 { self.group } else { n_inputs }
    }

    /// What `config.json` says of it, as compressed-tensors 0.20 writes it. `ignored` are modules that are left alone.
    pub fn config(&self, ignored: &[String]) -> Value {
        let eight = |kind: &str, strategy: &str, dynamic: bool| json!({"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": true, "dynamic": dynamic, "group_size": null});
        let (format, weights, activations) = match self.format {
            Format::Fp8 => ("float-quantized", eight("float", "channel", false), eight("float", "token", true)),
            Format::Fp8Static => ("float-quantized", eight("float", "channel", false), eight("float", "tensor", false)),
            Format::Int8 => ("int-quantized", eight("int", "channel", false), eight("int", "token", true)),
            Format::Int4 => {
                let mut weights = eight("int", "group", false);
                (weights["num_bits"], weights["group_size"]) = (json!(4), json!(self.group));
                ("pack-quantized", weights, Value::Null)
            }
        };
        json!({
            "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "config_groups": {"group_0": {
                "targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": null,
            }},
            "ignore": ignored, "kv_cache_scheme": null, "global_compression_ratio": null,
        })
    }
}

fn suited(format: Format) -> &'static str {
    match format {
        Format::Fp8 | Format::Fp8Static => "take nearest",
        Format::Int8 => "take nearest or smoothquant",
        Format::Int4 => "take nearest, awq or gptq",
    }
}

const FORMATS: [(&str, Format); 4] =
    [("fp8", Format::Fp8), ("fp8-static", Format::Fp8Static), ("int8", Format::Int8), ("int4", Format::Int4)];
const METHODS: [(&str, Method); 4] =
    [("nearest", Method::Nearest), ("awq", Method::Awq), ("gptq", Method::Gptq), ("smoothquant", Method::SmoothQuant)];

fn named<T: Copy>(all: &[(&str, T)], name: &str) -> Result<T, String> {
    let found = all.iter().find(|(known, _)| *known == name);
    let names: Vec<_> = all.iter().map(|(known, _)| *known).collect();
    found.map(|(_, value)| *value).ok_or_else(|| format!("{name:?} is not known: take {}", names.join(", ")))
}

fn name_of<T: PartialEq>(all: &[(&'static str, T)], value: &T) -> &'static str {
    all.iter().find(|(_, known)| known == value).map_or("", |(name, _)| name)
}

impl FromStr for Format {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        named(&FORMATS, name)
    }
}

impl FromStr for Method {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        named(&METHODS, name)
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(name_of(&FORMATS, self))
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(name_of(&METHODS, self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_that_make_no_sense_are_refused_with_those_that_do() {
        let refused = |format, method, group| Scheme { format, method, group }.check().unwrap_err().to_string();
        assert_eq!(refused(Format::Fp8, Method::Awq, 128), "--method awq is not for --format fp8: take nearest");
        let text = "--method gptq is not for --format int8: take nearest or smoothquant";
        assert_eq!(refused(Format::Int8, Method::Gptq, 128), text);
        assert_eq!(refused(Format::Int4, Method::Awq, 48), "--group is 48: take a multiple of 32, such as 128");
        assert!(Scheme { format: Format::Int8, method: Method::SmoothQuant, group: 7 }.check().is_ok());
    }

    #[test]
    fn names_come_back() {
        for (name, format) in FORMATS {
            assert_eq!((name.parse(), format.to_string().as_str()), (Ok(format), name));
        }
        assert_eq!("fp9".parse::<Format>(), Err("\"fp9\" is not known: take fp8, fp8-static, int8, int4".to_owned()));
    }
}
