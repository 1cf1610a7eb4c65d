//! Harmony, gpt-oss's format: messages on channels. Thoughts are on `analysis`, calls are messages to `functions.NAME`,
//! everything else is text. The prompt ends with the opening of the first message.
//!
//! ```text
//! <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>
//! ```

use super::{
    Machine,
    marks::{Found, JsonSpan, find, starts},
    sink::Sink,
};

const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
/// What begins a header.
const HEADS: &[&str] = &[CHANNEL, "<|start|>", " to=", "to="];
/// What ends a message's body.
const ENDS: &[&str] = &["<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL];

/// Follows one answer.
#[derive(Debug, Default)]
pub(super) struct Harmony {
    place: Place,
    has_text: bool,
}

#[derive(Debug, Default)]
enum Place {
    #[default]
    Start,
    Header,
    Body(Body),
}

#[derive(Debug)]
enum Body {
    Reasoning,
    Text,
    /// The arguments of a call.
    Call {
        span: JsonSpan,
        is_over: bool,
        is_empty: bool,
    },
}

impl Harmony {
    fn header(&mut self, text: &str, is_end: bool, sink: &mut Sink) -> Option<usize> {
        let Some(len) = text.find(MESSAGE) else { return is_end.then_some(text.len()) };
        self.place = Place::Body(self.body_of(&text[..len], sink));
        Some(len + MESSAGE.len())
    }

    fn body_of(&mut self, header: &str, sink: &mut Sink) -> Body {
        let word = |text: &str| text.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or("").to_owned();
        let recipient = header.split_once("to=").map(|(_, rest)| word(rest));
        let channel = header.rsplit_once(CHANNEL).map(|(_, rest)| word(rest.trim_start()));
        match recipient.as_deref().filter(|name| !["", "assistant", "user"].contains(name)) {
            Some(name) => {
                sink.call(name.strip_prefix("functions.").unwrap_or(name), None);
                Body::Call { span: JsonSpan::default(), is_over: false, is_empty: true }
            }
            None if channel.as_deref() == Some("analysis") => Body::Reasoning,
            None => {
                if std::mem::replace(&mut self.has_text, true) {
                    sink.text("\n\n");
                }
                Body::Text
            }
        }
    }

    fn body(body: &mut Body, text: &str, sink: &mut Sink) {
        match body {
            Body::Reasoning => sink.reasoning(text),
            Body::Text => sink.text(text),
            Body::Call { span, is_over, is_empty } => {
                let json = if *is_empty { text.trim_ascii_start() } else { text };
                if json.is_empty() || *is_over {
                    return;
                }
                *is_empty = false;
                let end = span.end_in(json);
                sink.arguments(&json[..end.unwrap_or(json.len())]);
                if end.is_some() {
                    *is_over = true;
                    sink.call_end();
                }
            }
        }
    }
}

impl Machine for Harmony {
    fn step(&mut self, text: &str, is_end: bool, sink: &mut Sink) -> Option<usize> {
        match &mut self.place {
            Place::Start => {
                let head = starts(text, HEADS, is_end)?;
                self.place = if head.is_some() { Place::Header } else { Place::Body(Body::Text) };
                Some(0)
            }
            Place::Header => self.header(text, is_end, sink),
            Place::Body(body) => match find(text, ENDS, is_end) {
                Found::NoneBefore(0) => None,
                Found::NoneBefore(end) => {
                    Self::body(body, &text[..end], sink);
                    Some(end)
                }
                Found::Mark { at, mark } => {
                    Self::body(body, &text[..at], sink);
                    if let Body::Call { is_empty: true, .. } = body {
                        sink.arguments("{}");
                        sink.call_end();
                    }
                    self.place = Place::Header;
                    // The next header begins with these.
                    Some(if mark == CHANNEL { at } else { at + mark.len() })
                }
            },
        }
    }
}
