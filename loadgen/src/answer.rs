//! A streamed answer as it comes: server-sent events, what they say and when each piece of it came, and how it ended.
//! Reads no clock.

use std::time::Instant;

use serde::Deserialize;
use thiserror::Error;

/// What a stream has shown so far.
#[derive(Debug, Default)]
pub struct Answer {
    unread: Vec<u8>,
    pieces: Vec<Instant>,
    usage: Option<Usage>,
    text: String,
    calls: Vec<Call>,
    finish_reason: Option<String>,
    is_done: bool,
}

/// The server's own count.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the completion.
    #[serde(default)]
    pub completion_tokens: u32,
}

/// A complete answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Complete {
    /// When each piece of text came; at least one.
    pub pieces: Vec<Instant>,
    /// Without it completion tokens are taken to be the pieces.
    pub usage: Option<Usage>,
    /// What was said, thoughts left out.
    pub text: String,
    /// Tools that were called.
    pub calls: Vec<Call>,
    /// Why it ended, in the server's word.
    pub finish_reason: Option<String>,
}

/// A tool call, put together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Call {
    /// The server's name of it.
    pub id: String,
    /// Of the tool.
    pub name: String,
    /// JSON, if all went well.
    pub arguments: String,
}

/// Why a stream is no answer.
#[derive(Clone, Debug, Error, PartialEq)]
pub enum AnswerError {
    /// An error instead of a chunk.
    #[error("error event: {0}")]
    Event(String),
    /// Neither a chunk nor an error.
    #[error("not a chunk of a completion: {0}")]
    Malformed(String),
    /// The stream ended before `[DONE]`.
    #[error("the stream ended after {0} pieces, without [DONE]")]
    Cut(usize),
    /// It ended properly, and nothing was in it.
    #[error("the stream has no choice")]
    Empty,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
    finish_reason: Option<String>,
}

#[derive(Default, Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning: Option<String>,
    reasoning_content: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<CallDelta>>,
}

#[derive(Deserialize)]
struct CallDelta {
    #[serde(default)]
    index: usize,
    id: Option<String>,
    function: Option<FunctionDelta>,
}

#[derive(Deserialize)]
struct FunctionDelta {
    name: Option<String>,
    arguments: Option<String>,
}

impl Answer {
    /// Takes in bytes that arrived at `now`, cut anywhere.
    pub fn take(&mut self, bytes: &[u8], now: Instant) -> Result<(), AnswerError> {
        self.unread.extend_from_slice(bytes);
        while let Some(end) = self.unread.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.unread.drain(..=end).collect();
            self.line(&String::from_utf8_lossy(&line), now)?;
        }
        Ok(())
    }

    /// Whether a piece of it has come.
    pub fn has_begun(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// The stream is over.
    pub fn end(self) -> Result<Complete, AnswerError> {
        match self {
            Self { is_done: false, pieces, .. } => Err(AnswerError::Cut(pieces.len())),
            Self { pieces, .. } if pieces.is_empty() => Err(AnswerError::Empty),
            Self { pieces, usage, text, calls, finish_reason, .. } => {
                Ok(Complete { pieces, usage, text, calls, finish_reason })
            }
        }
    }

    /// One line; all but `data:` (comments, event names, empty ones) say nothing about the answer.
    fn line(&mut self, line: &str, now: Instant) -> Result<(), AnswerError> {
        let Some(data) = line.trim_end().strip_prefix("data:").map(str::trim_start) else { return Ok(()) };
        if data == "[DONE]" {
            self.is_done = true;
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_str(data).map_err(|_| AnswerError::Malformed(shortened(data)))?;
        if let Some(error) = chunk.error {
            return Err(AnswerError::Event(shortened(&error.to_string())));
        }
        // The end of an answer without visible text is the first that is seen of it.
        let is_first_and_last = self.pieces.is_empty() && chunk.choices.iter().any(|one| one.finish_reason.is_some());
        if is_first_and_last || chunk.choices.iter().any(Choice::is_piece) {
            self.pieces.push(now);
        }
        self.usage = chunk.usage.or(self.usage);
        chunk.choices.into_iter().try_for_each(|choice| self.said(choice))
    }

    fn said(&mut self, choice: Choice) -> Result<(), AnswerError> {
        let delta = choice.delta.unwrap_or_default();
        for text in [choice.text, delta.content].into_iter().flatten() {
            self.text += &text;
        }
        self.finish_reason = choice.finish_reason.or(self.finish_reason.take());
        delta.tool_calls.unwrap_or_default().into_iter().try_for_each(|call| self.called(call))
    }

    /// Parts of a call come one after the other, those of the next call behind them.
    fn called(&mut self, CallDelta { index, id, function }: CallDelta) -> Result<(), AnswerError> {
        if index == self.calls.len() {
            self.calls.push(Call::default());
        }
        let skipped = || AnswerError::Malformed(format!("tool call {index} comes before those in front of it"));
        let call = self.calls.get_mut(index).ok_or_else(skipped)?;
        call.id += &id.unwrap_or_default();
        if let Some(FunctionDelta { name, arguments }) = function {
            call.name += &name.unwrap_or_default();
            call.arguments += &arguments.unwrap_or_default();
        }
        Ok(())
    }
}

impl Choice {
    fn is_piece(&self) -> bool {
        let has = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let delta = self.delta.as_ref().is_some_and(|delta| {
            let calls = delta.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty());
            calls || [&delta.content, &delta.reasoning, &delta.reasoning_content].into_iter().any(has)
        });
        delta || has(&self.text)
    }
}

/// Enough of a text to recognise it.
pub(crate) fn shortened(text: &str) -> String {
    text.chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn text(text: &str) -> String {
        format!(
            "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":null}}]}}\n\n"
        )
    }

    const ROLE: &str = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
    const FINISH: &str = "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n";
    const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3}}\n\n";
    const DONE: &str = "data: [DONE]\n\n";

    fn read(parts: &[&str]) -> Result<Complete, AnswerError> {
        let begun = Instant::now();
        let mut answer = Answer::default();
        for (seconds, part) in (0..).zip(parts) {
            answer.take(part.as_bytes(), begun + Duration::from_secs(seconds))?;
        }
        answer.end()
    }

    #[test]
    fn pieces_are_timed_when_they_come_and_only_text_is_a_piece() {
        let complete = read(&[ROLE, ": keep-alive\n\n", &text("a"), &text("b"), FINISH, USAGE, DONE]).unwrap();
        let gaps: Vec<_> = complete.pieces.windows(2).map(|pair| (pair[1] - pair[0]).as_secs()).collect();
        assert_eq!((complete.pieces.len(), gaps), (2, vec![1]));
        assert_eq!(complete.usage, Some(Usage { prompt_tokens: 9, completion_tokens: 3 }));
    }

    #[test]
    fn chunks_may_be_cut_anywhere_and_come_together() {
        let whole = format!("{}{}{FINISH}{DONE}", text("ä"), text("b"));
        let bytes = whole.as_bytes();
        for cut in 0..bytes.len() {
            let mut answer = Answer::default();
            answer.take(&bytes[..cut], Instant::now()).unwrap();
            answer.take(&bytes[cut..], Instant::now()).unwrap();
            assert_eq!(answer.end().unwrap().pieces.len(), 2, "cut at {cut}");
        }
    }

    #[test]
    fn completions_without_chat_are_read_too() {
        let piece = "data: {\"choices\":[{\"text\":\"a\",\"index\":0}]}\r\n\r\n";
        assert_eq!(read(&[piece, piece, DONE]).unwrap().pieces.len(), 2);
    }

    #[test]
    fn text_and_calls_are_put_together_and_thoughts_left_out() {
        let chunk = |delta: &str| format!("data: {{\"choices\":[{{\"delta\":{delta}}}]}}\n\n");
        let complete = read(&[
            ROLE,
            &chunk(r#"{"reasoning":"hm","reasoning_content":"hm"}"#),
            &text("so "),
            &text("be it"),
            &chunk(r#"{"tool_calls":[{"index":0,"id":"a","type":"function","function":{"name":"f","arguments":""}}]}"#),
            &chunk(r#"{"tool_calls":[{"index":0,"function":{"arguments":"{\"x\": "}}]}"#),
            &chunk(r#"{"tool_calls":[{"index":0,"function":{"arguments":"1}"}}]}"#),
            &chunk(r#"{"tool_calls":[{"index":1,"id":"b","function":{"name":"g","arguments":"{}"}}]}"#),
            &FINISH.replace("stop", "tool_calls"),
            DONE,
        ])
        .unwrap();
        let call = |id: &str, name: &str, arguments: &str| Call {
            id: id.to_owned(),
            name: name.to_owned(),
            arguments: arguments.to_owned(),
        };
        assert_eq!(complete.text, "so be it");
        assert_eq!(complete.calls, [call("a", "f", "{\"x\": 1}"), call("b", "g", "{}")]);
        assert_eq!((complete.finish_reason.as_deref(), complete.pieces.len()), (Some("tool_calls"), 7));
        let skips = chunk(r#"{"tool_calls":[{"index":1,"function":{"name":"g"}}]}"#);
        assert!(matches!(read(&[&skips, DONE]), Err(AnswerError::Malformed(_))));
    }

    #[test]
    fn an_answer_without_visible_text_is_an_answer() {
        assert_eq!(read(&[ROLE, FINISH, DONE]).unwrap().pieces.len(), 1);
    }

    #[test]
    fn what_is_no_answer_says_why() {
        assert_eq!(read(&[&text("a"), FINISH]), Err(AnswerError::Cut(1)));
        assert_eq!(read(&[DONE]), Err(AnswerError::Empty));
        assert!(matches!(read(&["data: {\"error\":{\"message\":\"no\"}}\n\n", DONE]), Err(AnswerError::Event(_))));
        assert!(matches!(read(&["data: <html>\n\n"]), Err(AnswerError::Malformed(_))));
    }
}
