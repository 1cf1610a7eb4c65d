//! A trace: which requests arrive when. Owns the file form (one JSON object a line) and the refusal of bad lines.

use serde::{Deserialize, Serialize};
use stoker_crds::contract::KV_BLOCK_TOKENS;
use thiserror::Error;

use super::model::ReplicaModel;

/// One request of a trace.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Request {
    /// Seconds since the trace began.
    pub arrived: f64,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Of those, tokens that a prefix cache holds: they take KV but no prefill.
    #[serde(default)]
    pub cached_tokens: u32,
    /// Tokens of the answer.
    pub completion_tokens: u32,
}

/// Requests in order of arrival, and what the fleet they meet is like.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    /// Its name in figures and plots.
    pub name: String,
    /// Seconds it lasts.
    pub seconds: f64,
    /// The requests.
    pub requests: Vec<Request>,
    /// Replicas that serve when it begins, the same for every rule.
    pub initial: u32,
    /// The replicas that serve it.
    pub model: ReplicaModel,
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
    #[error("no request in the trace: write one JSON object a line, such as {EXAMPLE_LINE}")]
    Empty,
}

/// A line that is accepted.
pub const EXAMPLE_LINE: &str = r#"{"arrived": 0.5, "promptTokens": 900, "completionTokens": 200}"#;

impl Trace {
    /// Reads the lines of a trace file.
    pub fn parse(name: &str, text: &str, model: ReplicaModel) -> Result<Self, TraceError> {
        let mut requests: Vec<Request> = Vec::new();
        for (idx, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let after = requests.last().map_or(0.0, |request| request.arrived);
            let request =
                parse_line(line, after, &model).map_err(|reason| TraceError::Line { line: idx + 1, reason })?;
            requests.push(request);
        }
        let last = requests.last().ok_or(TraceError::Empty)?.arrived;
        Ok(Self { name: name.to_owned(), seconds: last.floor() + 1.0, requests, initial: 1, model })
    }

    /// The lines of a trace file.
    pub fn lines(&self) -> String {
        let line = |request: &Request| serde_json::to_string(request).expect("numbers are JSON") + "\n";
        self.requests.iter().map(line).collect()
    }
}

fn parse_line(line: &str, after: f64, model: &ReplicaModel) -> Result<Request, String> {
    let request: Request =
        serde_json::from_str(line).map_err(|error| format!("{error}; a request is {EXAMPLE_LINE}"))?;
    let Request { arrived, prompt_tokens, cached_tokens, completion_tokens } = request;
    if !(arrived.is_finite() && arrived >= after) {
        return Err(format!("arrived is {arrived}, before {after} of the line above: sort the lines by arrival"));
    }
    if prompt_tokens == 0 || completion_tokens == 0 {
        return Err("promptTokens and completionTokens must be at least 1".to_owned());
    }
    if cached_tokens > prompt_tokens {
        return Err(format!("cachedTokens is {cached_tokens}, more than the {prompt_tokens} of the prompt"));
    }
    let tokens = u64::from(prompt_tokens) + u64::from(completion_tokens);
    let capacity = u64::from(model.blocks) * u64::from(KV_BLOCK_TOKENS);
    if tokens > capacity {
        return Err(format!("{tokens} tokens do not fit into the {capacity} tokens of a replica's KV cache"));
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(text: &str) -> String {
        Trace::parse("x", text, ReplicaModel::default()).unwrap_err().to_string()
    }

    #[test]
    fn a_written_trace_reads_back_as_itself() {
        let text = format!("{EXAMPLE_LINE}\n\n{}\n", EXAMPLE_LINE.replace("0.5", "2.25"));
        let trace = Trace::parse("x", &text, ReplicaModel::default()).unwrap();
        assert_eq!((trace.requests.len(), trace.seconds), (2, 3.0));
        assert_eq!(Trace::parse("x", &trace.lines(), ReplicaModel::default()).unwrap(), trace);
    }

    #[test]
    fn a_bad_line_is_refused_with_its_number_and_the_reason() {
        let good = EXAMPLE_LINE;
        assert!(refusal(&format!("{good}\n<html>\n")).starts_with("line 2: expected value"));
        assert!(
            refusal(&format!("{good}\n\n{}", good.replace("0.5", "0.1"))).starts_with("line 3: arrived is 0.1, before")
        );
        assert!(refusal(&good.replace("900", "0")).starts_with("line 1: promptTokens"));
        assert!(refusal(&good.replace("900", "9000000")).contains("do not fit into the 868496 tokens"));
        assert!(refusal(&good.replace("900", "900, \"cachedTokens\": 901")).contains("more than the 900"));
        assert!(refusal(&good.replace("200", "200, \"colour\": 1")).contains("unknown field `colour`"));
        assert!(refusal("\n").starts_with("no request"));
    }
}
