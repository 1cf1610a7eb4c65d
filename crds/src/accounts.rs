//! What an agent tells gateways of the time that its devices spent on tenants' requests and that no answer told. Plain serde, no clock, no
//! I/O.
//!
//! Times only rise while an agent runs. Each gateway has accounts of its own, by the name that it gives itself in the requests that it
//! sends or picks for ([`ACCOUNT_HEADER`]), so that of two that ask the same agent each hears what was its own.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Path of a gateway's accounts on an agent's admin port, before the gateway's name.
pub const ACCOUNTS_PATH: &str = "/v1/accounts";
/// Of a request, beside the name of its tenant: the gateway that asks for what no answer told.
pub const ACCOUNT_HEADER: &str = "x-stoker-account";

/// A gateway's accounts.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Accounts {
    /// Random per start of the agent: with another one all began at nothing.
    pub start_id: String,
    /// Microseconds of its devices, by tenants' names.
    pub device_micros: BTreeMap<String, u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wire_form_comes_back() {
        let told = Accounts { start_id: "s".into(), device_micros: [("search".into(), 7)].into() };
        let text = serde_json::to_string(&told).unwrap();
        assert_eq!(text, r#"{"startId":"s","deviceMicros":{"search":7}}"#);
        assert_eq!(serde_json::from_str::<Accounts>(&text).unwrap(), told);
    }
}
