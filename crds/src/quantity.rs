//! Kubernetes quantities as users write them. Nothing here computes with one.

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
