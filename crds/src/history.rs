//! What an agent remembers of its own load: the body of `GET /v1/history` on its admin port, for an operator that begins to lead.
//!
//! Plain serde, no clock. Moments are seconds since something that both sides count from: on the wire, the start of the agent's
//! process.

use serde::{Deserialize, Serialize};

/// Where it is asked for.
pub const HISTORY_PATH: &str = "/v1/history";
/// Bytes of an answer at most. A day with load takes some 60 KB.
pub const HISTORY_BYTES_MAX: usize = 256 * 1024;

/// The load of one replica for as long as its process has run, a day at most.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadHistory {
    /// As in `LoadReport`: which process remembers.
    pub start_id: String,
    /// As in `LoadReport`: when this was said.
    pub up_ms: u64,
    /// The last ten minutes, a sample every ten seconds; oldest first.
    pub fine: Vec<LoadSample>,
    /// The last day, a sample a minute; oldest first.
    pub minutes: Vec<LoadSample>,
}

/// The load at a moment: 36 bytes, because there are many. What is not known is NaN; on the wire, where a sample is a row of
/// numbers, it is null, and latencies are milliseconds.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(from = "Row", into = "Row")]
pub struct LoadSample {
    /// When, in seconds.
    pub at_seconds: u32,
    /// Replicas worked towards. No agent knows it, and it is in no row.
    pub wanted: f32,
    /// Replicas that serve; of one agent 1 or 0.
    pub serving: f32,
    /// Share of the KV blocks that sequences reference.
    pub kv: f32,
    /// Sequences being computed.
    pub running: f32,
    /// Requests waiting.
    pub waiting: f32,
    /// Tokens generated a second.
    pub tokens: f32,
    /// 95th percentile of the time to first token over the last minute, seconds.
    pub ttft: f32,
    /// 95th percentile between two tokens over the last minute, seconds.
    pub itl: f32,
}

type Number = Option<f32>;
type Row = (u32, Number, Number, Number, Number, Number, Number, Number);

impl From<Row> for LoadSample {
    fn from((at_seconds, serving, kv, running, waiting, tokens, ttft_ms, itl_ms): Row) -> Self {
        let known = |number: Number| number.unwrap_or(f32::NAN);
        Self {
            at_seconds,
            wanted: f32::NAN,
            serving: known(serving),
            kv: known(kv),
            running: known(running),
            waiting: known(waiting),
            tokens: known(tokens),
            ttft: known(ttft_ms) / 1000.0,
            itl: known(itl_ms) / 1000.0,
        }
    }
}

impl From<LoadSample> for Row {
    fn from(sample: LoadSample) -> Self {
        // Three decimals: more are not seen in a picture, and would double the answer.
        let short = |value: f32| value.is_finite().then(|| (value * 1000.0).round() / 1000.0);
        let LoadSample { at_seconds, wanted: _, serving, kv, running, waiting, tokens, ttft, itl } = sample;
        (
            at_seconds,
            short(serving),
            short(kv),
            short(running),
            short(waiting),
            short(tokens),
            short(ttft * 1000.0),
            short(itl * 1000.0),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> LoadSample {
        LoadSample {
            at_seconds: 17,
            wanted: f32::NAN,
            serving: 1.0,
            kv: 0.25,
            running: 12.667_123,
            waiting: 0.0,
            tokens: f32::NAN,
            ttft: 0.5,
            itl: 0.012_5,
        }
    }

    #[test]
    fn a_sample_is_a_short_row_and_what_is_not_known_is_null() {
        let text = serde_json::to_string(&sample()).unwrap();
        assert_eq!(text, "[17,1.0,0.25,12.667,0.0,null,500.0,12.5]");
        let read: LoadSample = serde_json::from_str(&text).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
        assert!(read.tokens.is_nan() && read.wanted.is_nan() && read.ttft == 0.5, "{read:?}");
    }

    #[test]
    fn a_row_of_another_form_is_refused() {
        for row in ["[17,1,0,0,0,0,0]", "[-1,1,0,0,0,0,0,0]", "[17,\"1\",0,0,0,0,0,0]", "{}", "[17,1,0,0,0,0,0,0,0]"] {
            assert!(serde_json::from_str::<LoadSample>(row).is_err(), "{row}");
        }
    }

    #[test]
    fn a_day_with_load_fits_an_answer() {
        let sample = |at_seconds| LoadSample { at_seconds, running: 1234.567, tokens: 12_345.678, ..sample() };
        let history = LoadHistory {
            fine: (0..61).map(|idx| sample(86_400 + idx)).collect(),
            minutes: (0..1440).map(|idx| sample(86_400 + idx)).collect(),
            ..LoadHistory::default()
        };
        let bytes = serde_json::to_string(&history).unwrap().len();
        assert!(bytes < HISTORY_BYTES_MAX / 3, "{bytes}");
    }
}
