//! A trace: which requests arrive when. Owns our own file form (one JSON object a line), the recognition of the forms
//! that others publish, and the refusal of bad lines.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{
    HASH_BLOCK_TOKENS, HashIds, Rng,
    published::{self, Form},
};

/// A longer time without any request is taken to be one that nobody recorded, or a clock that jumped.
const PAUSE_SECONDS_MAX: f64 = 3600.0;
/// What becomes of it: as long as a rule takes to go down, so that it is still seen, and no more, so that hours of it do not outweigh
/// what was recorded.
const GAP_SECONDS: f64 = 600.0;

/// One request of a trace.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Request {
    /// Seconds since the trace began.
    pub arrived: f64,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Of those, tokens that a prefix cache holds: they take KV but no prefill. Where `hash_ids` say what is shared, this is what one
    /// cache without end for all replicas would hold, and a simulated replica looks into its own instead.
    #[serde(default)]
    pub cached_tokens: u32,
    /// Tokens of the answer.
    pub completion_tokens: u32,
    /// Names of the prompt's blocks of 512 tokens, as far as the trace says them.
    #[serde(default, skip_serializing_if = "HashIds::is_empty")]
    pub hash_ids: HashIds,
}

/// Requests in order of arrival.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Its name in figures and plots.
    pub name: String,
    /// Seconds it lasts.
    pub seconds: f64,
    /// The requests.
    pub requests: Vec<Request>,
}

/// Why a line of a trace file is refused.
#[derive(Debug, Error)]
pub enum TraceError {
    /// Not a request.
    #[error("line {line}: {reason}")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
    /// No line at all.
    #[error(
        "no request in the trace: write one JSON object a line, such as {EXAMPLE_LINE}, or give an Azure LLM, BurstGPT \
         or Mooncake trace as published"
    )]
    Empty,
}

/// A line that is accepted.
pub const EXAMPLE_LINE: &str = r#"{"arrived": 0.5, "promptTokens": 900, "completionTokens": 200}"#;

/// A file that was read.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadTrace {
    /// What it says.
    pub trace: Trace,
    /// Rows of a published trace without an answer: requests that failed there, so that nobody knows how long theirs was.
    pub left_out: usize,
    /// Times without a request that were shortened.
    pub gaps: Gaps,
}

/// Times without a request, too long to be load.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gaps {
    /// How many.
    pub n: usize,
    /// Seconds that they were longer in all than they are now.
    pub cut_seconds: f64,
}

impl ReadTrace {
    /// Shortens what is too long to be load.
    pub(crate) fn of(mut trace: Trace, left_out: usize) -> Self {
        let (mut gaps, mut before) = (Gaps::default(), 0.0);
        for request in &mut trace.requests {
            let pause = request.arrived - before;
            before = request.arrived;
            if pause > PAUSE_SECONDS_MAX {
                gaps.n += 1;
                gaps.cut_seconds += pause - GAP_SECONDS;
            }
            request.arrived -= gaps.cut_seconds;
        }
        trace.seconds -= gaps.cut_seconds.floor();
        Self { trace, left_out, gaps }
    }

    /// Says what was left out and what was shortened, each in a sentence.
    pub fn tell(&self, mut tell: impl FnMut(String)) {
        let Self { trace: Trace { name, .. }, left_out, gaps } = self;
        if *left_out > 0 {
            tell(format!("{name}: {left_out} requests without an answer are left out"));
        }
        if gaps.n > 0 {
            tell(format!(
                "{name}: {} gaps of more than {:.0} minutes without a request are shortened to {:.0} minutes each, {:.1} hours \
                 less in all: the clock jumped, or nothing was recorded; cut the file there if the parts do not belong together",
                gaps.n,
                PAUSE_SECONDS_MAX / 60.0,
                GAP_SECONDS / 60.0,
                gaps.cut_seconds / 3600.0
            ));
        }
    }
}

impl Trace {
    /// Reads a trace file in any form we know, told apart by its first line.
    pub fn read(name: &str, text: &str) -> Result<ReadTrace, TraceError> {
        match Form::of(text) {
            Some(form) => published::read(name, text, form),
            None => Self::parse(name, text).map(|trace| ReadTrace::of(trace, 0)),
        }
    }

    /// Reads the lines of our own form.
    pub fn parse(name: &str, text: &str) -> Result<Self, TraceError> {
        let mut requests: Vec<Request> = Vec::new();
        for (idx, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let after = requests.last().map_or(0.0, |request| request.arrived);
            let request = parse_line(line, after).map_err(|reason| TraceError::Line { line: idx + 1, reason })?;
            requests.push(request);
        }
        Self::of(name, requests)
    }

    /// Requests in order as a trace that ends with the second of the last one.
    pub fn of(name: &str, requests: Vec<Request>) -> Result<Self, TraceError> {
        let last = requests.last().ok_or(TraceError::Empty)?.arrived;
        Ok(Self { name: name.to_owned(), seconds: last.floor() + 1.0, requests })
    }

    /// The lines of a trace file.
    pub fn lines(&self) -> String {
        let line = |request: &Request| serde_json::to_string(request).expect("numbers are JSON") + "\n";
        self.requests.iter().map(line).collect()
    }

    /// This many times the load: each request again, up to a minute earlier or later, so that bursts of the copies meet
    /// as those of independent users do. What prompts share they share within their copy.
    #[must_use]
    pub fn copied(&self, copies: u32, seed: u64) -> Self {
        let mut rng = Rng::seeded(seed ^ 0xc0_91e5);
        let mut requests = self.requests.clone();
        for copy in 1..copies {
            let moved = |request: &Request| Request {
                arrived: (request.arrived + 120.0 * rng.uniform() - 60.0).clamp(0.0, self.seconds),
                hash_ids: request.hash_ids.in_copy(copy),
                ..request.clone()
            };
            requests.extend(self.requests.iter().map(moved));
        }
        requests.sort_by(|a, b| a.arrived.total_cmp(&b.arrived));
        Self { requests, ..self.clone() }
    }
}

fn parse_line(line: &str, after: f64) -> Result<Request, String> {
    let request: Request =
        serde_json::from_str(line).map_err(|error| format!("{error}; a request is {EXAMPLE_LINE}"))?;
    let Request { arrived, prompt_tokens, cached_tokens, completion_tokens, ref hash_ids } = request;
    if !(arrived.is_finite() && arrived >= after) {
        return Err(format!("arrived is {arrived}, before {after} of the line above: sort the lines by arrival"));
    }
    if prompt_tokens == 0 || completion_tokens == 0 {
        return Err("promptTokens and completionTokens must be at least 1".to_owned());
    }
    if cached_tokens > prompt_tokens {
        return Err(format!("cachedTokens is {cached_tokens}, more than the {prompt_tokens} of the prompt"));
    }
    let (named, blocks) = (hash_ids.as_slice().len(), prompt_tokens.div_ceil(HASH_BLOCK_TOKENS));
    if named > blocks as usize {
        return Err(format!(
            "hashIds names {named} blocks of {HASH_BLOCK_TOKENS} tokens, and a prompt of {prompt_tokens} has {blocks}"
        ));
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        Trace::read("x", text).unwrap_err().to_string()
    }

    #[test]
    fn a_written_trace_reads_back_as_itself() {
        let named = EXAMPLE_LINE.replace("0.5", "2.25").replace("200", "200, \"hashIds\": [7, 3]");
        let text = format!("{EXAMPLE_LINE}\n\n{named}\n");
        let trace = Trace::parse("x", &text).unwrap();
        assert_eq!((trace.requests.len(), trace.seconds), (2, 3.0));
        assert_eq!(trace.requests[1].hash_ids.as_slice(), [7, 3]);
        assert!(trace.requests[0].hash_ids.is_empty() && !trace.lines().lines().next().unwrap().contains("hashIds"));
        assert_eq!(Trace::read("x", &trace.lines()).unwrap(), ReadTrace { trace, left_out: 0, gaps: Gaps::default() });
    }

    #[test]
    fn a_bad_line_is_refused_with_its_number_and_the_reason() {
        let good = EXAMPLE_LINE;
        assert!(refusal(&format!("{good}\n<html>\n")).starts_with("line 2: expected value"));
        assert!(
            refusal(&format!("{good}\n\n{}", good.replace("0.5", "0.1"))).starts_with("line 3: arrived is 0.1, before")
        );
        assert!(refusal(&good.replace("900", "0")).starts_with("line 1: promptTokens"));
        assert!(refusal(&good.replace("900", "900, \"cachedTokens\": 901")).contains("more than the 900"));
        assert!(refusal(&good.replace("200", "200, \"hashIds\": [1, 2, 3]")).contains("names 3 blocks of 512 tokens"));
        assert!(refusal(&good.replace("200", "200, \"colour\": 1")).contains("unknown field `colour`"));
        assert!(refusal("{\"arrived\": 1}").starts_with("line 1: missing field `promptTokens`"));
        assert!(refusal("\n").starts_with("no request"));
    }

    /// A night that nobody recorded, a clock that jumped by weeks, and Unix times instead of seconds.
    #[test]
    fn a_gap_is_shortened_and_told() {
        for (times, arrived, words) in [
            (&[0.0, 3600.0, 3700.0][..], &[0.0, 3600.0, 3700.0][..], None),
            (&[0.5, 10.0, 36_010.0, 36_020.0], &[0.5, 10.0, 610.0, 620.0], Some("1 gaps")),
            (&[0.0, 5e6, 1e7], &[0.0, 600.0, 1200.0], Some("2 gaps")),
            (&[1_700_000_000.0, 1_700_000_001.0], &[600.0, 601.0], Some("1 gaps")),
        ] {
            let line = |time: &f64| EXAMPLE_LINE.replace("0.5", &time.to_string()) + "\n";
            let read = Trace::read("x", &times.iter().map(line).collect::<String>()).unwrap();
            let found: Vec<f64> = read.trace.requests.iter().map(|request| request.arrived).collect();
            assert_eq!(found, arrived, "{times:?}");
            assert_eq!(read.trace.seconds, arrived.last().unwrap().floor() + 1.0, "{times:?}");
            let mut told = Vec::new();
            read.tell(|sentence| told.push(sentence));
            assert_eq!(told.len(), words.iter().len(), "{told:?}");
            assert!(
                told.iter().zip(words).all(|(told, words)| told.starts_with(&format!("x: {words} of more than 60")))
            );
        }
    }

    #[test]
    fn copies_are_that_many_times_the_load_in_order() {
        let text = format!("{EXAMPLE_LINE}\n{}\n", EXAMPLE_LINE.replace("0.5", "200"));
        let trace = Trace::parse("x", &text).unwrap().copied(4, 1);
        assert_eq!((trace.requests.len(), trace.seconds), (8, 201.0));
        assert!(trace.requests.is_sorted_by_key(|request| request.arrived));
    }

    #[test]
    fn copies_share_what_was_shared_and_nothing_with_each_other() {
        let line = |arrived: &str, ids: &str| {
            EXAMPLE_LINE.replace("0.5", arrived).replace("200", &format!("200, \"hashIds\": [{ids}]")) + "\n"
        };
        let trace = Trace::parse("x", &(line("0.5", "1, 2") + &line("90", "1, 3"))).unwrap().copied(3, 1);
        let firsts: Vec<u64> = trace.requests.iter().map(|request| request.hash_ids.as_slice()[0]).collect();
        let of_same = |first: &u64| firsts.iter().filter(|other| *other == first).count();
        assert_eq!(firsts.iter().map(of_same).collect::<Vec<_>>(), [2; 6]);
    }
}
