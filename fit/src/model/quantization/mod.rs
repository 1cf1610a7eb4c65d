//! `quantization_config` of a `config.json`: which projections of a model are quantised, and how. A description that prints
//! itself; what it does not know it refuses, before a weight is looked for. Reads a JSON value, never a file.

mod bitsandbytes;
mod compressed_tensors;
mod four_bits;
mod fp8;
mod modules;
mod scheme;

use serde_json::Value;

pub use scheme::{Activations, Bits, Codes, GroupIndices, Part, PartKind, SCALES_OF_ONE, Scheme, SharedBy};

use super::{ModelError, fields::Fields};
use modules::{Modules, Writing};

const FIELD: &str = "quantization_config";
/// Methods that are read.
const METHODS: &str = "fp8, fbgemm_fp8, compressed-tensors, awq, gptq, bitsandbytes";

/// How a model's projections are quantised.
#[derive(Clone, Debug)]
pub struct Quantization {
    /// What made it, as published.
    method: &'static str,
    /// The first one whose modules contain a projection says how it is.
    rules: Vec<Rule>,
    /// Projections that no rule is asked for.
    left_alone: Modules,
    /// Whether the output matrix may be quantised: some methods never do, and do not say so.
    with_head: bool,
}

/// Some modules and how they are quantised.
#[derive(Clone, Debug)]
struct Rule {
    modules: Modules,
    scheme: Scheme,
}

impl Quantization {
    /// Reads the field of a configuration, if it has one.
    pub(super) fn read(config: &Fields) -> Result<Option<Self>, ModelError> {
        let Some(value) = config.get(FIELD) else { return Ok(None) };
        let file = format!("{}: {FIELD}", config.file());
        let Value::Object(_) = value else { return Err(config.wrong(FIELD, value, "an object")) };
        let fields = Fields::of(value, &file)?;
        let method = fields.text("quant_method")?;
        match method {
            Some("fp8") => fp8::read(&fields),
            Some("fbgemm_fp8") => fp8::read_fbgemm(&fields),
            Some("compressed-tensors") => compressed_tensors::read(&fields),
            Some("awq") => four_bits::read_awq(&fields),
            Some("gptq") => four_bits::read_gptq(&fields),
            Some("bitsandbytes") => bitsandbytes::read(&fields),
            Some(other) => {
                let problem =
                    format!("is {other:?}, which is not implemented; take a checkpoint made with one of: {METHODS}");
                Err(fields.error("quant_method", problem))
            }
            None => Err(fields.error("quant_method", format!("is missing; it is one of: {METHODS}"))),
        }
        .map(Some)
    }

    /// How a projection is quantised, if it is.
    pub(super) fn scheme_of(&self, module: &str) -> Option<&Scheme> {
        let is_left = (module == HEAD && !self.with_head) || self.left_alone.contains(module);
        self.rules.iter().filter(|_| !is_left).find(|rule| rule.modules.contains(module)).map(|rule| &rule.scheme)
    }

    /// Its name where there is room for one word: `fp8`, `int8`, `int4`, `mxfp4`, else its method.
    pub fn name(&self) -> &'static str {
        match self.rules.first().map(|rule| rule.scheme.codes) {
            Some(Codes::E4m3) => "fp8",
            Some(Codes::Int8 | Codes::Packed(Bits::Eight)) => "int8",
            Some(Codes::Packed(Bits::Four)) => "int4",
            Some(Codes::E2m1) => "mxfp4",
            Some(Codes::Awq | Codes::Gptq { .. } | Codes::Levels) | None => self.method,
        }
    }
}

/// The output matrix as a module.
const HEAD: &str = "lm_head";

/// The list of a field in the manner of transformers, under either of two names.
fn left_alone(fields: &Fields) -> Result<Modules, ModelError> {
    let list = |field| {
        let names = fields.texts(field)?.unwrap_or_default();
        Modules::of(&names, Writing::Transformers, |problem| fields.error(field, problem))
    };
    Ok(list("modules_to_not_convert")?.and(list("ignored_layers")?))
}
