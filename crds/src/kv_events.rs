//! What an agent tells gateways of its prefix cache: which beginnings of prompts it holds, by the names that gateways gave them
//! ([`PREFIXES_HEADER`]). Plain serde, no clock, no I/O.
//!
//! Events are numbered from one start of the agent. `GET /v1/kv-events?start=S&since=N&wait=SECONDS` is answered as soon as there
//! is an event behind number N of start S, or after the wait with none. Where these do not follow any more, because there were too
//! many or it is another start, the answer is all that is held. So whoever was away goes on with what is.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

/// Path of the events on an agent's admin port.
pub const KV_EVENTS_PATH: &str = "/v1/kv-events";
/// Names of a request's prompt and its beginnings: `BYTES END:NAME END:NAME …`, ends in bytes of all of it, names in hexadecimal,
/// the shortest beginning first.
pub const PREFIXES_HEADER: &str = "x-stoker-prefixes";
/// Beginnings that one request may name.
pub const PREFIXES_MAX: usize = 256;
/// Longest wait for an event, in seconds.
pub const WAIT_SECONDS_MAX: u64 = 30;
/// Events in an answer at most; the next question brings the next ones. All that is held comes at once.
pub const EVENTS_MAX: usize = 16_384;

/// An answer.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KvEvents {
    /// Random per start of the agent: with another one its cache was empty.
    pub start_id: String,
    /// Number of the event before the first of these.
    pub after: u64,
    /// Number of the last of these, or as many as there were.
    pub number: u64,
    /// These are all that is held, instead of what changed.
    pub is_whole: bool,
    /// In their order.
    pub events: Vec<KvEvent>,
}

/// What became of a beginning of prompts; `+NAME` or `-NAME`, in hexadecimal: not every reader of JSON keeps 64 bits of a number.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum KvEvent {
    /// It is held from now on.
    Stored(u64),
    /// Not any more.
    Removed(u64),
}

impl fmt::Display for KvEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stored(name) => write!(f, "+{name:016x}"),
            Self::Removed(name) => write!(f, "-{name:016x}"),
        }
    }
}

impl KvEvent {
    fn parse(text: &str) -> Option<Self> {
        let (sign, name) = text.split_at_checked(1)?;
        let name = Some(name).filter(|name| name.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
        let name = u64::from_str_radix(name, 16).ok()?;
        match sign {
            "+" => Some(Self::Stored(name)),
            "-" => Some(Self::Removed(name)),
            _ => None,
        }
    }
}

impl Serialize for KvEvent {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for KvEvent {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'_, str>::deserialize(deserializer)?;
        Self::parse(&text).ok_or_else(|| D::Error::custom(format!("{text:?} is neither +NAME nor -NAME")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wire_form_is_short_and_comes_back() {
        let events = vec![KvEvent::Stored(255), KvEvent::Removed(u64::MAX)];
        let told = KvEvents { start_id: "s".into(), after: 3, number: 5, is_whole: false, events };
        let text = serde_json::to_string(&told).unwrap();
        assert!(text.contains(r#""isWhole":false,"events":["+00000000000000ff","-ffffffffffffffff"]"#), "{text}");
        assert_eq!(serde_json::from_str::<KvEvents>(&text).unwrap(), told);
    }

    #[test]
    fn what_is_no_event_is_refused() {
        for text in ["", "ff", "+", "+-1", "+11112222333344445", "*ff", "é"] {
            assert!(serde_json::from_value::<KvEvent>(text.into()).is_err(), "{text}");
        }
    }
}
