//! What an answer cost, in tokens: of one that came whole, as its `usage` says; of a stream, as its marks say. And in device seconds, which
//! are in the head of the one and in the marks of the other. Reads nothing else of an answer.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use bytes::{Buf, BytesMut};
use memchr::memmem;
use serde::Deserialize;
use stoker_crds::accounts::ACCOUNT_TOKENS;

use crate::headers::ACCOUNT;

/// Of an answer, device seconds. Of a request, `marks`: marks are to tell them.
pub const DEVICE_SECONDS: HeaderName = HeaderName::from_static("x-stoker-device-seconds");

/// Tokens of a request and its answer, and what was done for them.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Usage {
    /// Of the prompt; nothing while only an estimate is there, 0 where all tokens are on account (`accounts.rs`).
    pub prompt_tokens: Option<u32>,
    /// Of these, those that a cache held.
    pub cached_tokens: u32,
    /// Of the answer.
    pub completion_tokens: u32,
    /// Time of replicas' devices; nothing where no replica has told any.
    pub device_time: Option<Duration>,
}

/// As the APIs write it: OpenAI's chat and completions, its responses, Anthropic's messages.
#[derive(Deserialize)]
struct Written {
    #[serde(alias = "input_tokens")]
    prompt_tokens: u32,
    #[serde(default, alias = "output_tokens")]
    completion_tokens: u32,
    #[serde(default, alias = "input_tokens_details")]
    prompt_tokens_details: Option<Details>,
    #[serde(default)]
    cache_read_input_tokens: u32,
}

#[derive(Default, Deserialize)]
struct Details {
    #[serde(default)]
    cached_tokens: u32,
}

impl Usage {
    /// What the head of an answer tells: device seconds, and whether tokens are on account.
    pub fn of_head(headers: &HeaderMap) -> Self {
        let is_on_account = headers.get(ACCOUNT).is_some_and(|what| what == ACCOUNT_TOKENS);
        let device_time = device_time_of(headers);
        Self { prompt_tokens: is_on_account.then_some(0), device_time, ..Self::default() }
    }

    /// With what the rest of the answer tells.
    pub fn and(self, rest: Self) -> Self {
        let prompt_tokens = self.prompt_tokens.or(rest.prompt_tokens);
        Self { prompt_tokens, device_time: rest.device_time.or(self.device_time), ..rest }
    }

    /// Of a whole answer: its last `usage`. Text of the answer that looks like one has its quotes escaped.
    pub fn of_whole(body: &[u8]) -> Option<Self> {
        const FIELD: &[u8] = b"\"usage\":";
        let at = memmem::rfind(body, FIELD)? + FIELD.len();
        let written = serde_json::Deserializer::from_slice(&body[at..]).into_iter::<Written>().next()?.ok()?;
        let details = written.prompt_tokens_details.unwrap_or_default().cached_tokens;
        // Anthropic does not count cached tokens among those of the prompt.
        let prompt_tokens = Some(written.prompt_tokens.saturating_add(written.cache_read_input_tokens));
        let cached_tokens = details.saturating_add(written.cache_read_input_tokens);
        let completion_tokens = written.completion_tokens;
        Some(Self { prompt_tokens, cached_tokens, completion_tokens, device_time: None })
    }
}

fn device_time_of(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(DEVICE_SECONDS)?.to_str().ok()?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// As it is told to clients.
pub fn device_seconds(time: Duration) -> HeaderValue {
    let seconds = format!("{:.6}", time.as_secs_f64());
    HeaderValue::from_str(&seconds).expect("digits and a point are visible ASCII")
}

/// Of an answer that passes in parts and has no marks: its last bytes, where its `usage` is, and how many events it had.
#[derive(Debug, Default)]
pub struct Tail {
    last: BytesMut,
    n_events: u32,
}

/// The last event of a stream, and the end of a whole answer, are shorter.
const TAIL_BYTES: usize = 8 << 10;
/// How an event with a part of an answer begins.
const EVENT: &[u8] = b"data: {";

impl Tail {
    /// A part of it.
    pub fn pass(&mut self, part: &[u8]) {
        self.n_events = self.n_events.saturating_add(memmem::find_iter(part, EVENT).count() as u32);
        let n_over = (self.last.len() + part.len()).saturating_sub(TAIL_BYTES);
        self.last.advance(n_over.min(self.last.len()));
        self.last.extend_from_slice(&part[part.len().saturating_sub(TAIL_BYTES)..]);
    }

    /// What it cost: as it says, or a token for each event of a stream that says nothing.
    pub fn usage(&self) -> Usage {
        let guess = Usage { completion_tokens: self.n_events, ..Usage::default() };
        Usage::of_whole(&self.last).unwrap_or(guess)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_an_answer_says_what_it_cost_and_a_stream_that_does_not_is_counted() {
        let usage = |parts: &[&[u8]]| {
            let mut tail = Tail::default();
            parts.iter().for_each(|part| tail.pass(part));
            let Usage { prompt_tokens, completion_tokens, .. } = tail.usage();
            (prompt_tokens, completion_tokens)
        };
        let long = [b'x'; 3 * TAIL_BYTES];
        let said = br#"{"usage":{"prompt_tokens":9,"completion_tokens":4}}"#;
        assert_eq!(usage(&[&long, said]), (Some(9), 4));
        assert_eq!(usage(&[&[&long[..], said].concat()]), (Some(9), 4), "in one part");
        assert_eq!(usage(&[&said[..20], &said[20..]]), (Some(9), 4), "in two");
        let event: &[u8] = b"data: {\"a\":1}\n\n";
        assert_eq!(usage(&[event, &event.repeat(2), b"data: [DONE]\n\n"]), (None, 3));
        assert_eq!(usage(&[]), (None, 0));
    }

    #[test]
    fn device_seconds_are_read_as_they_are_written_or_not_at_all() {
        let of = |value: &str| {
            device_time_of(&HeaderMap::from_iter([(DEVICE_SECONDS, HeaderValue::from_str(value).unwrap())]))
        };
        let time = Duration::from_micros(90_061_000_001);
        assert_eq!(of(device_seconds(time).to_str().unwrap()), Some(time), "a day and more");
        for (value, expected) in
            [("0.000000", Some(Duration::ZERO)), ("-1", None), ("NaN", None), ("1e30", None), ("", None)]
        {
            assert_eq!(of(value), expected, "{value}");
        }
        assert_eq!(device_time_of(&HeaderMap::new()), None);
    }

    #[test]
    fn an_estimate_stands_where_no_part_of_an_answer_tells_more() {
        let head = |pairs: &[(&'static str, &'static str)]| {
            let pairs =
                pairs.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
            Usage::of_head(&pairs.collect())
        };
        let rest = Usage { prompt_tokens: Some(9), completion_tokens: 4, ..Usage::default() };
        let seconds = Some(Duration::from_millis(1500));
        let of_both = head(&[("x-stoker-device-seconds", "1.5")]).and(rest);
        assert_eq!(of_both, Usage { device_time: seconds, ..rest });
        assert_eq!(head(&[]).and(Usage::default()), Usage::default());
        let on_account = head(&[("x-stoker-account", "tokens")]).and(Usage::default());
        assert_eq!(on_account, Usage { prompt_tokens: Some(0), ..Usage::default() });
    }

    #[test]
    fn every_api_s_usage_is_read() {
        let of = |body: &str| Usage::of_whole(body.as_bytes());
        let usage = |prompt, cached_tokens, completion_tokens| {
            Some(Usage { prompt_tokens: Some(prompt), cached_tokens, completion_tokens, device_time: None })
        };
        for (body, expected) in [
            (r#"{"usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13}}"#, usage(9, 0, 4)),
            (
                r#"{"usage": {"prompt_tokens": 9, "total_tokens": 13, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}, "x": 1}"#,
                usage(9, 8, 4),
            ),
            (r#"{"usage":{"input_tokens":9,"output_tokens":4,"cache_read_input_tokens":16}}"#, usage(25, 16, 4)),
            (
                r#"{"usage":{"input_tokens":9,"output_tokens":4,"input_tokens_details":{"cached_tokens":1}}}"#,
                usage(9, 1, 4),
            ),
            (
                r#"{"choices":[{"text":"\"usage\":{\"prompt_tokens\":1}"}],"usage":{"prompt_tokens":2,"completion_tokens":3}}"#,
                usage(2, 0, 3),
            ),
            (r#"{"choices":[{"text":"\"usage\":{\"prompt_tokens\":1}"}]}"#, None),
            (
                r#"{"usage":{"input_tokens":4294967295,"output_tokens":4,"cache_read_input_tokens":4294967295}}"#,
                usage(u32::MAX, u32::MAX, 4),
            ),
            (r#"{"usage":null}"#, None),
            (r#"{"usage":{"prompt_tokens":-1}}"#, None),
            (r#"{"usage":"#, None),
            ("", None),
        ] {
            assert_eq!(of(body), expected, "{body}");
        }
    }
}
