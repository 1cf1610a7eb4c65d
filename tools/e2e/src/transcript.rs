//! What a client received of a streamed answer: server-sent events in, a [`Transcript`] out. Pure; knows the wire form
//! and nothing of where it came from.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// A streamed chat completion, as its client saw it.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct Transcript {
    /// The answer.
    pub(crate) text: String,
    /// Why it ended, as the last choice says.
    pub(crate) finish_reason: Option<String>,
    /// Tokens of the answer by the server's own count.
    pub(crate) completion_tokens: Option<u64>,
    /// Whether the stream said that it is complete.
    pub(crate) done: bool,
}

impl Transcript {
    /// Reads the body of a streamed answer. An error inside the stream is an error here.
    pub(crate) fn parse(body: &str) -> Result<Self> {
        let mut transcript = Self::default();
        for data in body.lines().filter_map(|line| line.strip_prefix("data: ")) {
            ensure!(!transcript.done, "an event after [DONE]: {data}");
            if data == "[DONE]" {
                transcript.done = true;
            } else {
                transcript.add(&serde_json::from_str(data).with_context(|| format!("event is not JSON: {data}"))?)?;
            }
        }
        ensure!(transcript != Self::default(), "no events, but: {}", body.trim());
        Ok(transcript)
    }

    /// Checks that the stream is whole: `expected` tokens, a finish reason, and the closing event.
    pub(crate) fn check_whole(&self, expected: u64) -> Result<()> {
        ensure!(self.done, "cut before [DONE], after {} characters", self.text.len());
        ensure!(self.finish_reason.as_deref() == Some("length"), "finish_reason is {:?}", self.finish_reason);
        ensure!(self.completion_tokens == Some(expected), "{:?} tokens instead of {expected}", self.completion_tokens);
        Ok(())
    }

    fn add(&mut self, event: &Value) -> Result<()> {
        if let Some(error) = event.get("error") {
            bail!("the stream ended with an error: {error}");
        }
        if let Some(count) = event["usage"]["completion_tokens"].as_u64() {
            self.completion_tokens = Some(count);
        }
        let choice = &event["choices"][0];
        self.text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reason = Some(reason.to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHOLE: &str = r#"data: {"choices":[{"delta":{"role":"assistant","content":""}}]}

data: {"choices":[{"delta":{"content":"Hel"}}]}

data: {"choices":[{"delta":{"content":"lo"}}]}

data: {"choices":[{"delta":{},"finish_reason":"length"}]}

data: {"choices":[],"usage":{"completion_tokens":2}}

data: [DONE]

"#;

    #[test]
    fn a_whole_stream_has_its_text_its_count_and_its_end() {
        let transcript = Transcript::parse(WHOLE).unwrap();
        assert_eq!(transcript.text, "Hello");
        transcript.check_whole(2).unwrap();
        assert!(transcript.check_whole(3).is_err());
    }

    #[test]
    fn a_stream_that_is_cut_is_not_whole() {
        let cut = Transcript::parse(&WHOLE[..WHOLE.find("data: [DONE]").unwrap()]).unwrap();
        assert!(cut.check_whole(2).unwrap_err().to_string().contains("cut before [DONE]"));
    }

    #[test]
    fn an_error_event_or_an_error_body_is_reported_as_it_came() {
        let error = Transcript::parse("data: {\"error\":{\"message\":\"draining\"}}\n\ndata: [DONE]\n").unwrap_err();
        assert!(error.to_string().contains("draining"));
        let body = Transcript::parse("{\"error\":{\"message\":\"no such model\"}}").unwrap_err();
        assert!(body.to_string().contains("no such model"));
    }
}
