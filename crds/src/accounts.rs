//! What an agent tells gateways of what tenants' requests had and no answer told: time of its devices, and tokens. Plain serde, no clock, no
//! I/O.
//!
//! Numbers only rise while an agent runs. Each gateway has accounts of its own, by the name that it gives itself in the requests that it
//! sends or picks for ([`ACCOUNT_HEADER`]), so that of two that ask the same agent each hears what was its own.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Path of a gateway's accounts on an agent's admin port, before the gateway's name.
pub const ACCOUNTS_PATH: &str = "/v1/accounts";
/// Of a request, beside the name of its tenant: the gateway that asks for what no answer told. Of an answer, [`ACCOUNT_TOKENS`]: its tokens are
/// on the account.
pub const ACCOUNT_HEADER: &str = "x-stoker-account";
/// Of an answer whose tokens will be on its tenant's account, because nobody waits for them.
pub const ACCOUNT_TOKENS: &str = "tokens";

/// Tokens of a tenant's requests.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Tokens {
    /// Of prompts.
    pub prompt: u64,
    /// Of these, those that a cache held.
    pub cached: u64,
    /// Of answers.
    pub completion: u64,
}

/// A gateway's accounts.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Accounts {
    /// Random per start of the agent: with another one all began at nothing.
    pub start_id: String,
    /// Microseconds of its devices, by tenants' names.
    pub device_micros: BTreeMap<String, u64>,
    /// By tenants' names, of those that have some.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tokens: BTreeMap<String, Tokens>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wire_form_comes_back() {
        let device_micros = [("search".into(), 7)].into();
        let told = Accounts { start_id: "s".into(), device_micros, tokens: BTreeMap::new() };
        let tokens = [("search".into(), Tokens { prompt: 5, cached: 0, completion: 2 })].into();
        for (told, expected) in [
            (told.clone(), r#"{"startId":"s","deviceMicros":{"search":7}}"#),
            (
                Accounts { tokens, ..told },
                r#"{"startId":"s","deviceMicros":{"search":7},"tokens":{"search":{"prompt":5,"cached":0,"completion":2}}}"#,
            ),
        ] {
            let text = serde_json::to_string(&told).unwrap();
            assert_eq!(text, expected);
            assert_eq!(serde_json::from_str::<Accounts>(&text).unwrap(), told);
        }
    }
}
