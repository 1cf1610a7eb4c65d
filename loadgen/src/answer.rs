//! A streamed answer as it comes: server-sent events, when each piece of text came, and how it ended. Reads no clock.

use std::time::Instant;

use serde::Deserialize;
use thiserror::Error;

/// What a stream has shown so far.
#[derive(Debug, Default)]
pub struct Answer {
    unread: Vec<u8>,
    pieces: Vec<Instant>,
    usage: Option<Usage>,
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

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning_content: Option<String>,
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

    /// The stream is over.
    pub fn end(self) -> Result<Complete, AnswerError> {
        match self {
            Self { is_done: false, pieces, .. } => Err(AnswerError::Cut(pieces.len())),
            Self { pieces, .. } if pieces.is_empty() => Err(AnswerError::Empty),
            Self { pieces, usage, .. } => Ok(Complete { pieces, usage }),
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
        Ok(())
    }
}

impl Choice {
    fn is_piece(&self) -> bool {
        let has = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let delta = self.delta.as_ref().is_some_and(|delta| has(&delta.content) || has(&delta.reasoning_content));
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
