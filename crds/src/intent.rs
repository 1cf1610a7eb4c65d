//! What a replica should do, as the operator tells its agent: plain serde, no keys, no clock, no I/O.
//!
//! An [`Order`] is the body of `PUT /v1/intent` on the agent's admin port, signed with ed25519 over [`signed_bytes`]. It
//! names the pod and the process that it is for, so it is worth nothing anywhere else, and a number that only rises, so
//! that a late or repeated one changes nothing. It ends by the agent's own uptime: no clock of one machine is compared
//! with another's.

use serde::{Deserialize, Serialize};

use crate::contract::DrainSettings;

/// Path of an order on the admin port.
pub const INTENT_PATH: &str = "/v1/intent";
/// Header with the signature, in hexadecimal digits.
pub const SIGNATURE_HEADER: &str = "stoker-signature";
/// An order is no longer than this.
pub const ORDER_BYTES_MAX: usize = 4096;
/// Where the operator's public keys are mounted in an agent pod. The kubelet renews them while the pod runs.
pub const KEYS_DIR: &str = "/etc/stoker-keys";
/// File in [`KEYS_DIR`]: one public key in hexadecimal digits a line; `#` begins a comment.
pub const KEYS_FILE: &str = "operator.pub";
/// Public keys that an agent looks at; more are ignored.
pub const KEYS_MAX: usize = 8;
/// Bytes of a public key, and of the seed that a private one is made from.
pub const KEY_BYTES: usize = 32;
/// Environment variable with the UID of the agent's pod.
pub const POD_UID_VARIABLE: &str = "STOKER_POD_UID";

/// Keeps a signature of ours from meaning anything elsewhere.
pub const INTENT_PURPOSE: &[u8] = b"stoker.dev/intent/v1\n";

/// What a replica should do.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Want {
    /// Take requests. What an agent does that was never told anything.
    #[default]
    Serve,
    /// Withdraw, finish what runs, report empty.
    Drain(DrainSettings),
}

/// Body of `PUT /v1/intent`.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Order {
    /// UID of the pod that it is for.
    pub pod_uid: String,
    /// Process in that pod that it is for: `startId` of its load report.
    pub start_id: String,
    /// Rises with every change of mind about this pod.
    pub number: u64,
    /// What the replica should do.
    pub want: Want,
    /// Milliseconds after the agent's start from which on it is refused: `upMs` of a load report and some time.
    pub expires_up_ms: u64,
}

/// What is signed for a body of this purpose.
pub fn signed_bytes(purpose: &[u8], body: &[u8]) -> Vec<u8> {
    [purpose, body].concat()
}

/// Hexadecimal digits of `bytes`.
pub fn hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).expect("a nibble is below 16");
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// The `N` bytes that these hexadecimal digits say; `None` for anything else.
pub fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digits: Vec<u8> = text.chars().map(|c| c.to_digit(16).map(|digit| digit as u8)).collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    if digits.len() == 2 * N { bytes.try_into().ok() } else { None }
}

/// The public keys in the text of [`KEYS_FILE`]; lines that are none are left out.
pub fn public_keys(text: &str) -> Vec<[u8; KEY_BYTES]> {
    let words = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    words.filter_map(unhex).take(KEYS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_the_same_after_its_way() {
        let order = Order {
            pod_uid: "u".into(),
            start_id: "s".into(),
            number: 7,
            want: Want::Drain(DrainSettings { deadline_seconds: 60, withdraw_seconds: 3 }),
            expires_up_ms: 1,
        };
        let text = serde_json::to_string(&order).unwrap();
        assert!(text.contains(r#""want":{"drain":{"deadlineSeconds":60,"withdrawSeconds":3}}"#), "{text}");
        assert_eq!(serde_json::from_str::<Order>(&text).unwrap(), order);
        assert_eq!(serde_json::to_string(&Want::Serve).unwrap(), r#""serve""#);
        assert!(serde_json::from_str::<Order>(&text.replace("number", "nummer")).is_err());
    }

    #[test]
    fn keys_are_read_line_by_line_and_what_is_none_is_left_out() {
        let (a, b) = ([1; KEY_BYTES], [0xfe; KEY_BYTES]);
        let text = format!("# of today\n{}\n\nnonsense\n{} # tomorrow\n{}", hex(&a), hex(&b), &hex(&a)[2..]);
        assert_eq!(public_keys(&text), [a, b]);
    }

    #[test]
    fn hexadecimal_digits_of_another_length_are_none() {
        assert_eq!(unhex::<2>("ab0f"), Some([0xab, 0x0f]));
        assert_eq!([unhex::<2>("ab0"), unhex::<2>("ab0f0"), unhex::<2>("ab0f00"), unhex::<2>("xy00")], [None; 4]);
    }
}
