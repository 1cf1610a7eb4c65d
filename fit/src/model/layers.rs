//! Which layers of a model look back a window only, and which turn queries and keys. A rule where the file has a rule:
//! what a file claims about its number of layers costs no memory here.

use serde_json::Value;

use super::{
    ModelError,
    family::{Rotary, Windows},
    fields::Fields,
};

/// The windows of a model's layers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct WindowLayers {
    /// Tokens a windowed layer sees; `None`: no layer has a window.
    window: Option<usize>,
    which: Which,
}

/// The layers that turn queries and keys.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RopeLayers(Which);

/// Some of a model's layers.
#[derive(Clone, Debug, PartialEq)]
enum Which {
    All,
    From(usize),
    AllButEvery(usize),
    Listed(Vec<bool>),
}

impl Which {
    fn contains(&self, idx: usize) -> bool {
        match self {
            Self::All => true,
            Self::From(first) => idx >= *first,
            Self::AllButEvery(period) => !(idx + 1).is_multiple_of(*period),
            Self::Listed(layers) => layers[idx],
        }
    }
}

impl WindowLayers {
    const NONE: Self = Self { window: None, which: Which::All };

    /// `layer_types` decides where it is; older files follow the rule of the family.
    pub(super) fn read(
        fields: &Fields,
        rule: Windows,
        default: Option<usize>,
        n_layers: usize,
    ) -> Result<Self, ModelError> {
        let is_asked = fields.flag("use_sliding_window", false)?;
        match rule {
            Windows::UpperLayers { .. } | Windows::Unsupported if !is_asked => return Ok(Self::NONE),
            Windows::Unsupported => {
                let problem = "is true: the windows of this family are not implemented, expected false";
                return Err(fields.error("use_sliding_window", problem.into()));
            }
            Windows::Never | Windows::EveryLayer | Windows::UpperLayers { .. } | Windows::AllButEvery { .. } => {}
        }
        let window = fields.optional_size("sliding_window")?.or(fields.if_absent("sliding_window", default));
        let Some(window) = window else { return Ok(Self::NONE) };
        if let Some(types) = fields.layers("layer_types", n_layers)? {
            let which = types.iter().map(|kind| is_windowed(kind, fields)).collect::<Result<_, _>>()?;
            return Ok(Self { window: Some(window), which: Which::Listed(which) });
        }
        let which = match rule {
            Windows::Never | Windows::Unsupported => return Ok(Self::NONE),
            Windows::EveryLayer => Which::All,
            Windows::UpperLayers { from } => Which::From(fields.optional_size("max_window_layers")?.unwrap_or(from)),
            Windows::AllButEvery { period } => {
                Which::AllButEvery(fields.optional_size("sliding_window_pattern")?.unwrap_or(period))
            }
        };
        Ok(Self { window: Some(window), which })
    }

    /// Tokens the layer sees, the present one included; `None`: all.
    pub(super) fn of_layer(&self, idx: usize) -> Option<usize> {
        self.window.filter(|_| self.which.contains(idx))
    }
}

impl RopeLayers {
    pub(super) fn read(fields: &Fields, rule: Rotary, n_layers: usize) -> Result<Self, ModelError> {
        let Rotary::AllButEvery { field, period, list } = rule else { return Ok(Self(Which::All)) };
        if let Some(listed) = fields.layers(list, n_layers)? {
            return Ok(Self(Which::Listed(listed.iter().map(|turns| turns.as_u64() != Some(0)).collect())));
        }
        Ok(Self(Which::AllButEvery(fields.optional_size(field)?.unwrap_or(period))))
    }

    pub(super) fn turns(&self, idx: usize) -> bool {
        self.0.contains(idx)
    }
}

fn is_windowed(kind: &Value, fields: &Fields) -> Result<bool, ModelError> {
    match kind.as_str() {
        Some("sliding_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => Err(fields.wrong("layer_types", kind, "\"full_attention\" or \"sliding_attention\"")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const UPPER: Windows = Windows::UpperLayers { from: 5 };

    fn windows(config: Value, rule: Windows) -> Vec<Option<usize>> {
        let fields = Fields::of(&config, "config.json").unwrap();
        let layers = WindowLayers::read(&fields, rule, Some(7), 6).unwrap();
        (0..6).map(|idx| layers.of_layer(idx)).collect()
    }

    #[test]
    fn each_familys_rule_says_which_layers_have_the_window() {
        let (all, one) = (None, Some(4));
        let model = json!({"sliding_window": 4});
        assert_eq!(windows(model.clone(), Windows::Never), [all; 6]);
        assert_eq!(windows(model.clone(), Windows::EveryLayer), [one; 6]);
        assert_eq!(windows(model.clone(), UPPER), [all; 6]);
        let upper = json!({"sliding_window": 4, "use_sliding_window": true, "max_window_layers": 4});
        assert_eq!(windows(upper, UPPER), [all, all, all, all, one, one]);
        assert_eq!(windows(model, Windows::AllButEvery { period: 3 }), [one, one, all, one, one, all]);
        assert_eq!(windows(json!({"sliding_window": null}), Windows::EveryLayer), [all; 6]);
        assert_eq!(windows(json!({}), Windows::EveryLayer), [Some(7); 6], "what transformers assumes");
        let asked = json!({"use_sliding_window": true});
        assert_eq!(windows(asked, UPPER), [all, all, all, all, all, Some(7)]);
    }

    #[test]
    fn a_list_of_layer_types_is_believed_before_the_rule() {
        let types = ["full_attention", "sliding_attention", "full_attention"].repeat(2);
        let model = json!({"sliding_window": 9, "layer_types": types});
        assert_eq!(windows(model, Windows::EveryLayer), [None, Some(9), None, None, Some(9), None]);
    }

    #[test]
    fn layer_types_of_another_length_or_kind_are_refused() {
        let refusal = |types: Value| {
            let config = json!({"sliding_window": 4, "layer_types": types});
            let fields = Fields::of(&config, "config.json").unwrap();
            WindowLayers::read(&fields, Windows::Never, None, 2).unwrap_err().to_string()
        };
        assert!(refusal(json!(["full_attention"])).contains("each of the 2 layers"));
        assert!(refusal(json!(["full_attention", "chunked"])).contains("`layer_types` is \"chunked\""));
    }
}
