//! Kubernetes quantities as users write them, and as numbers, to compare what pods ask for. Pure.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// A Kubernetes quantity as users write it: a whole number (of any size: bytes need 64 bits) or a text.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Amount {
    /// As in `cpu: 4`.
    Whole(i64),
    /// As in `memory: 8Gi`.
    Text(String),
}

/// The schema of [`Amount`].
pub(crate) fn quantity_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"x-kubernetes-int-or-string": true, "maxLength": 32})
}

impl Amount {
    /// What it stands for; `None` when it is no quantity.
    pub fn value(&self) -> Option<f64> {
        match self {
            Self::Whole(number) => Some(*number as f64),
            Self::Text(text) => amount(text),
        }
    }
}

/// Suffixes and their factors; the longer ones first, so that `Mi` is not taken for `i` after `M`.
const SUFFIXES: [(&str, f64); 16] = [
    ("Ki", 1024.0),
    ("Mi", 1_048_576.0),
    ("Gi", 1_073_741_824.0),
    ("Ti", 1_099_511_627_776.0),
    ("Pi", 1_125_899_906_842_624.0),
    ("Ei", 1_152_921_504_606_846_976.0),
    ("n", 1e-9),
    ("u", 1e-6),
    ("m", 1e-3),
    ("k", 1e3),
    ("M", 1e6),
    ("G", 1e9),
    ("T", 1e12),
    ("P", 1e15),
    ("E", 1e18),
    ("", 1.0),
];

/// The amount a quantity stands for; `None` when it is not one.
pub fn amount(quantity: &str) -> Option<f64> {
    let text = quantity.trim();
    // `1e3` and `1E3` are exponents, `1E` is a suffix: a number that parses as it stands is one.
    if let Ok(number) = text.parse::<f64>() {
        return Some(number).filter(|number| number.is_finite());
    }
    let (digits, factor) = SUFFIXES.iter().find_map(|(suffix, factor)| Some((text.strip_suffix(suffix)?, factor)))?;
    digits.parse::<f64>().ok().filter(|number| number.is_finite()).map(|number| number * factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_as_kubernetes_reads_them() {
        let read = amount;
        assert_eq!(read("4"), Some(4.0));
        assert_eq!(read("500m"), Some(0.5));
        assert_eq!(read("1.5Gi"), Some(1.5 * 1_073_741_824.0));
        assert_eq!(read("1e3"), Some(1000.0));
        assert_eq!(read("2E"), Some(2e18));
        assert_eq!(read("1Qi"), None);
        assert_eq!(read("inf"), None);
    }
}
