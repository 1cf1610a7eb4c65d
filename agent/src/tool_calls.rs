//! Finds tool calls in generated text: `<tool_call>{"name": …, "arguments": …}</tool_call>`, the format of Hermes, Qwen and
//! ember. Pure and incremental: however the text is cut, the pieces add up to the same answer, and text that only looks
//! like a call stays text.

use serde::Deserialize;
use serde_json::value::RawValue;

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// Text for the user.
    Text(String),
    /// A call for the client to make.
    Call(Call),
}

/// One call of a tool.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The function.
    pub name: String,
    /// Its arguments as JSON text, exactly as the model wrote them.
    pub arguments: String,
}

/// Splits one growing text into pieces.
#[derive(Clone, Debug, Default)]
pub struct ToolCallParser {
    held: String,
    inside: bool,
}

#[derive(Deserialize)]
struct WrittenCall {
    name: String,
    arguments: Option<Box<RawValue>>,
}

/// Whether a model that was trained with this template writes calls in the format understood here.
pub fn understands(chat_template: &str) -> bool {
    chat_template.contains(OPEN)
}

impl ToolCallParser {
    /// Takes more text; returns the pieces that became certain.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.held.push_str(text);
        let mut pieces = Vec::new();
        while let Some(end) = self.held.find(self.tag()) {
            let (before, after) = (self.held[..end].to_owned(), self.held[end + self.tag().len()..].to_owned());
            pieces.push(if self.inside { call_or_text(&before, CLOSE) } else { Piece::Text(before) });
            self.inside = !self.inside;
            self.held = after;
        }
        if !self.inside {
            let certain = self.held.len() - undecided(&self.held);
            pieces.push(Piece::Text(self.held.drain(..certain).collect()));
        }
        joined(pieces)
    }

    /// The end of the text: what was held back comes out.
    pub fn finish(&mut self) -> Vec<Piece> {
        let held = std::mem::take(&mut self.held);
        let piece = if self.inside { call_or_text(&held, "") } else { Piece::Text(held) };
        self.inside = false;
        joined(vec![piece])
    }

    fn tag(&self) -> &'static str {
        if self.inside { CLOSE } else { OPEN }
    }
}

/// A body that is not a call is given back as it was written.
fn call_or_text(body: &str, close: &str) -> Piece {
    match serde_json::from_str::<WrittenCall>(body) {
        Ok(call) => Piece::Call(Call { name: call.name, arguments: arguments_text(call.arguments.as_deref()) }),
        Err(_) => Piece::Text(format!("{OPEN}{body}{close}")),
    }
}

/// Some models write the arguments as a JSON string that holds JSON.
fn arguments_text(arguments: Option<&RawValue>) -> String {
    let raw = arguments.map_or("{}", RawValue::get);
    serde_json::from_str::<String>(raw).unwrap_or_else(|_| raw.to_owned())
}

/// Bytes at the end of `text` that may be the beginning of a call.
fn undecided(text: &str) -> usize {
    (1..OPEN.len()).rev().find(|n| text.ends_with(&OPEN[..*n])).unwrap_or(0)
}

/// Neighbouring texts as one, empty ones left out.
fn joined(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut joined: Vec<Piece> = Vec::new();
    for piece in pieces {
        match (joined.last_mut(), piece) {
            (_, Piece::Text(text)) if text.is_empty() => {}
            (Some(Piece::Text(last)), Piece::Text(text)) => last.push_str(&text),
            (_, piece) => joined.push(piece),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse<'a>(chunks: impl IntoIterator<Item = &'a str>) -> Vec<Piece> {
        let mut parser = ToolCallParser::default();
        let mut pieces: Vec<Piece> = chunks.into_iter().flat_map(|chunk| parser.push(chunk)).collect();
        pieces.extend(parser.finish());
        joined(pieces)
    }

    fn call(name: &str, arguments: &str) -> Piece {
        Piece::Call(Call { name: name.into(), arguments: arguments.into() })
    }

    fn text(text: &str) -> Piece {
        Piece::Text(text.into())
    }

    #[test]
    fn calls_are_taken_out_of_the_text_around_them() {
        let answer = r#"Let me see.<tool_call>{"name": "f", "arguments": {"b": 1, "a": [2]}}</tool_call> Done."#;
        assert_eq!(parse([answer]), [text("Let me see."), call("f", r#"{"b": 1, "a": [2]}"#), text(" Done.")]);
    }

    #[test]
    fn every_way_to_cut_the_text_gives_the_same_pieces() {
        let answer = r#"é<tool<tool_call>{"name": "f", "arguments": {"x": "</tool"}}</tool_call><tool_call>{"name": "g"}</tool_call><"#;
        let whole = parse([answer]);
        assert_eq!(whole, [text("é<tool"), call("f", r#"{"x": "</tool"}"#), call("g", "{}"), text("<")]);
        let cuts: Vec<usize> = (0..=answer.len()).filter(|at| answer.is_char_boundary(*at)).collect();
        for first in &cuts {
            for second in cuts.iter().filter(|at| *at >= first) {
                assert_eq!(parse([&answer[..*first], &answer[*first..*second], &answer[*second..]]), whole);
            }
        }
    }

    #[test]
    fn what_is_not_a_call_stays_text() {
        for answer in
            ["<tool_call>not json</tool_call>", "<tool_call>{\"arguments\": {}}</tool_call>", "a < b <tool_cal"]
        {
            assert_eq!(parse([answer]), [text(answer)]);
        }
        assert_eq!(
            parse([r#"<tool_call>{"name": "f""#]),
            [text(r#"<tool_call>{"name": "f""#)],
            "cut off by max_tokens"
        );
    }

    #[test]
    fn a_call_whose_closing_tag_was_the_stop_is_still_a_call() {
        assert_eq!(parse([r#"<tool_call>{"name": "f", "arguments": "{\"x\": 1}"}"#]), [call("f", r#"{"x": 1}"#)]);
    }
}
