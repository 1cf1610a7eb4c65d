//! Calls whose arguments stand between tags, one pair a parameter: Qwen3-Coder's and GLM's formats. Values are written
//! without quotes, so the tool's schema decides what they are; those that are text stream.

use std::sync::Arc;

use super::{
    Machine, ToolSchemas,
    coerce::{Kind, escaped, json_of, quoted},
    marks::{Found, find, starts},
    sink::Sink,
};

/// How a format tags calls.
#[derive(Debug)]
pub(super) struct TaggedForm {
    /// Tags around a call.
    open: &'static [&'static str],
    /// In front of the function's name; empty if it stands right behind the opening tag.
    name: &'static str,
    /// What ends the name.
    name_end: &'static [char],
    /// Around a parameter's key, and between it and its value.
    key: [&'static str; 2],
    value: &'static str,
    value_end: &'static str,
    /// A new line at either end of a value is not part of it.
    is_padded: bool,
    /// What ends the parameters.
    end: &'static [&'static str],
    /// What else may stand behind a call.
    close: &'static [&'static str],
}

pub(super) static QWEN_CODER: TaggedForm = TaggedForm {
    open: &["<tool_call>", "<seed:tool_call>", "<function="],
    name: "<function=",
    name_end: &['>'],
    key: ["<parameter=", ">"],
    value: "",
    value_end: "</parameter>",
    is_padded: true,
    end: &["</function>", "</tool_call>", "</seed:tool_call>"],
    close: &["</tool_call>", "</seed:tool_call>"],
};

pub(super) static GLM: TaggedForm = TaggedForm {
    open: &["<tool_call>"],
    name: "",
    name_end: &['\n', '<'],
    key: ["<arg_key>", "</arg_key>"],
    value: "<arg_value>",
    value_end: "</arg_value>",
    is_padded: false,
    end: &["</tool_call>"],
    close: &[],
};

/// Follows one answer.
#[derive(Debug)]
pub(super) struct TaggedCalls {
    form: &'static TaggedForm,
    schemas: Arc<ToolSchemas>,
    place: Place,
    function: String,
    n_parameters: u32,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Text,
    /// Behind an opening tag.
    Opened {
        tag: &'static str,
    },
    /// Between parameters.
    Parameters,
    /// In a value.
    Value {
        kind: Kind,
        is_start: bool,
    },
    /// Behind a call.
    Behind,
}

impl TaggedCalls {
    pub(super) fn new(form: &'static TaggedForm, schemas: Arc<ToolSchemas>) -> Self {
        Self { form, schemas, place: Place::Text, function: String::new(), n_parameters: 0 }
    }

    fn opened(&mut self, text: &str, tag: &'static str, is_end: bool, sink: &mut Sink) -> Option<usize> {
        let body = text.trim_ascii_start();
        let mut at = text.len() - body.len();
        if tag != self.form.name {
            match starts(body, &[self.form.name], is_end) {
                None => return None,
                Some(None) => return self.give_back(tag, sink),
                Some(Some(mark)) => at += mark.len(),
            }
        }
        let Some(len) = text[at..].find(self.form.name_end) else {
            return if is_end || !is_name(&text[at..]) { self.give_back(tag, sink) } else { None };
        };
        let name = text[at..at + len].trim();
        if name.is_empty() || !is_name(name) {
            return self.give_back(tag, sink);
        }
        sink.call(name, None);
        (self.function, self.n_parameters, self.place) = (name.to_owned(), 0, Place::Parameters);
        let ends_in_tag = text[at + len..].starts_with('<');
        Some(at + len + usize::from(!ends_in_tag))
    }

    fn give_back(&mut self, tag: &str, sink: &mut Sink) -> Option<usize> {
        sink.text(tag);
        self.place = Place::Text;
        Some(0)
    }

    fn parameters(&mut self, text: &str, is_end: bool, sink: &mut Sink) -> Option<usize> {
        let form = self.form;
        let body = text.trim_ascii_start();
        let blank = text.len() - body.len();
        if body.is_empty() {
            return Some(blank);
        }
        let marks: Vec<&'static str> = [&form.key[..1], form.end].concat();
        match starts(body, &marks, is_end)? {
            Some(mark) if mark == form.key[0] => self.key(text, blank, is_end, sink),
            Some(mark) => {
                sink.arguments(if self.n_parameters == 0 { "{}" } else { "}" });
                sink.call_end();
                self.place = Place::Behind;
                Some(blank + mark.len())
            }
            // No format puts anything here: it is skipped up to the next tag.
            None => {
                let next = body.char_indices().skip(1).find(|(_, c)| *c == '<');
                Some(blank + next.map_or(body.len(), |(at, _)| at))
            }
        }
    }

    /// A key and the opening of its value.
    fn key(&mut self, text: &str, at: usize, is_end: bool, sink: &mut Sink) -> Option<usize> {
        let form = self.form;
        let wait = is_end.then_some(text.len());
        let key_at = at + form.key[0].len();
        let Some(len) = text[key_at..].find(form.key[1]) else { return wait };
        let value_at = key_at + len + form.key[1].len();
        let rest = &text[value_at..];
        let value_at = match rest.find(form.value) {
            Some(at) => value_at + at + form.value.len(),
            None => return wait,
        };
        let key = text[key_at..key_at + len].trim();
        let kind = self.schemas.kind(&self.function, key);
        let before = if self.n_parameters == 0 { "{" } else { ", " };
        let opening = if kind == Kind::Text { "\"" } else { "" };
        sink.arguments(&format!("{before}{}: {opening}", quoted(key)));
        self.n_parameters += 1;
        self.place = Place::Value { kind, is_start: form.is_padded };
        Some(value_at)
    }

    fn value(&mut self, text: &str, kind: Kind, is_start: bool, is_end: bool, sink: &mut Sink) -> Option<usize> {
        if is_start && !text.is_empty() {
            self.place = Place::Value { kind, is_start: false };
            return Some(usize::from(text.starts_with('\n')));
        }
        let (end, mark) = match find(text, &[self.form.value_end], is_end) {
            Found::Mark { at, mark } => (at, Some(mark)),
            Found::NoneBefore(end) => (end, None),
        };
        let padding = usize::from(self.form.is_padded && text[..end].ends_with('\n') && !(is_end && mark.is_none()));
        let value = &text[..end - padding];
        match (kind, mark) {
            (Kind::Text, _) => sink.arguments(&escaped(value)),
            (Kind::Any, None) if !is_end => return None,
            (Kind::Any, _) => sink.arguments(&json_of(value, kind)),
        }
        let Some(mark) = mark else { return if value.is_empty() { None } else { Some(value.len()) } };
        sink.arguments(if kind == Kind::Text { "\"" } else { "" });
        self.place = Place::Parameters;
        Some(end + mark.len())
    }

    fn behind(&mut self, text: &str, is_end: bool) -> Option<usize> {
        let body = text.trim_ascii_start();
        let blank = text.len() - body.len();
        if body.is_empty() {
            return Some(blank);
        }
        let mark = starts(body, self.form.close, is_end)?;
        self.place = Place::Text;
        Some(blank + mark.map_or(0, str::len))
    }
}

fn is_name(text: &str) -> bool {
    text.trim().chars().all(|c| c.is_alphanumeric() || "_-.:/".contains(c))
}

impl Machine for TaggedCalls {
    fn step(&mut self, text: &str, is_end: bool, sink: &mut Sink) -> Option<usize> {
        match self.place {
            Place::Text => match find(text, self.form.open, is_end) {
                Found::Mark { at, mark } => {
                    sink.text(&text[..at]);
                    self.place = Place::Opened { tag: mark };
                    Some(at + mark.len())
                }
                Found::NoneBefore(0) => None,
                Found::NoneBefore(end) => {
                    sink.text(&text[..end]);
                    Some(end)
                }
            },
            Place::Opened { tag } => self.opened(text, tag, is_end, sink),
            Place::Parameters => self.parameters(text, is_end, sink),
            Place::Value { kind, is_start } => self.value(text, kind, is_start, is_end, sink),
            Place::Behind => self.behind(text, is_end),
        }
    }

    fn end(&mut self, sink: &mut Sink) {
        if let Place::Opened { tag } = self.place {
            self.give_back(tag, sink);
        }
    }
}
