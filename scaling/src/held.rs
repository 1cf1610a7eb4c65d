//! What gateways hold: requests that no replica has room for, or that there is no replica for, and whether all of them said so.
//!
//! Owns the form only. Without a gateway nobody holds a request, and a deployment without replicas would answer none.

use serde::{Deserialize, Serialize};

/// See the module.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Held {
    /// Requests in line, at all gateways that said so.
    pub requests: u32,
    /// Who holds them.
    pub by: Holders,
}

impl Held {
    /// So many, at gateways that all said what they have.
    pub fn by_all(requests: u32) -> Self {
        Self { requests, by: Holders::All }
    }
}

/// Whether requests would be held while no replica serves, and whether that would be known.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Holders {
    /// No: no gateway leads the deployment's Service.
    #[default]
    Nobody,
    /// They would, but this one has not said lately what it has in line.
    Silent(String),
    /// Every gateway that may have some said how many.
    All,
}
