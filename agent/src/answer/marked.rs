//! Calls behind marks: JSON objects, alone or in a list, or a name and its arguments. One machine; a format says which
//! marks it has and how it writes what stands before the arguments.

use super::{
    Machine,
    json_call::{self, Head},
    marks::{Found, JsonSpan, find, starts},
    sink::Sink,
};

/// How a format marks calls.
#[derive(Debug)]
pub(super) struct MarkedForm {
    /// Marks in front of a call.
    open: &'static [&'static str],
    /// Marks around all calls: they mean nothing by themselves.
    section: &'static [&'static str],
    /// What may stand behind a call.
    close: &'static [&'static str],
    /// An object at the very beginning of the answer is a call without a mark.
    is_bare: bool,
    /// Reads what stands between the mark and the arguments, for formats that name the function outside of JSON.
    prefix: Option<fn(&str) -> Prefix>,
}

/// What stands before the first brace behind a mark.
#[derive(Debug, PartialEq)]
pub(super) enum Prefix {
    /// A function's name, and the id of the call if the model gives one.
    Named { name: String, id: Option<String> },
    /// Nothing: the object is the whole call.
    Json,
    /// No call.
    Other,
}

/// Text between a mark and a brace that is still a name: no function has a longer one.
const MAX_PREFIX_BYTES: usize = 512;

pub(super) static HERMES: MarkedForm =
    MarkedForm { open: &["<tool_call>"], section: &[], close: &["</tool_call>"], is_bare: false, prefix: None };

pub(super) static GRANITE: MarkedForm = MarkedForm { open: &["<|tool_call|>", "<tool_call>"], ..HERMES };

pub(super) static PHI4_MINI: MarkedForm =
    MarkedForm { open: &["<|tool_call|>", "functools"], close: &["<|/tool_call|>", "</tool_call>"], ..HERMES };

pub(super) static LLAMA: MarkedForm = MarkedForm { open: &["<|python_tag|>"], close: &[";"], is_bare: true, ..HERMES };

pub(super) static MISTRAL: MarkedForm =
    MarkedForm { open: &["[TOOL_CALLS]"], close: &[], prefix: Some(mistral_prefix), ..HERMES };

pub(super) static DEEPSEEK: MarkedForm = MarkedForm {
    open: &["<｜tool▁call▁begin｜>"],
    section: &["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"],
    close: &["```", "<｜tool▁call▁end｜>"],
    prefix: Some(deepseek_prefix),
    is_bare: false,
};

pub(super) static KIMI: MarkedForm = MarkedForm {
    open: &["<|tool_call_begin|>"],
    section: &["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
    close: &["<|tool_call_end|>"],
    prefix: Some(kimi_prefix),
    is_bare: false,
};

/// `[{…}]`, `{…}`, `f[ARGS]{…}`, `f[CALL_ID]id[ARGS]{…}` or `f{…}`, by the version of the tokenizer.
fn mistral_prefix(prefix: &str) -> Prefix {
    let head = prefix.trim();
    if head.is_empty() || head == "[" {
        return Prefix::Json;
    }
    let head = head.strip_suffix("[ARGS]").unwrap_or(head);
    match head.split_once("[CALL_ID]") {
        Some((name, id)) => named(name, Some(id.trim().to_owned())),
        None => named(head, None),
    }
}

/// `function<｜tool▁sep｜>NAME` and a fence (V3, R1), or `NAME<｜tool▁sep｜>` (V3.1).
fn deepseek_prefix(prefix: &str) -> Prefix {
    let Some((first, second)) = prefix.split_once("<｜tool▁sep｜>") else { return Prefix::Other };
    let second = second.trim();
    let second = second.strip_suffix("```json").or(second.strip_suffix("```")).unwrap_or(second);
    named(if second.trim().is_empty() { first } else { second }, None)
}

/// `functions.NAME:0<|tool_call_argument_begin|>`: the whole is the id that the model expects back.
fn kimi_prefix(prefix: &str) -> Prefix {
    let Some((id, "")) = prefix.trim_end().split_once("<|tool_call_argument_begin|>") else { return Prefix::Other };
    let name = id.trim().rsplit_once(':').map_or(id.trim(), |(name, _)| name);
    named(name.strip_prefix("functions.").unwrap_or(name), Some(id.trim().to_owned()))
}

fn named(name: &str, id: Option<String>) -> Prefix {
    let name = name.trim();
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "_-./:".contains(c));
    if is_name { Prefix::Named { name: name.to_owned(), id } } else { Prefix::Other }
}

/// Follows one answer.
#[derive(Debug)]
pub(super) struct MarkedCalls {
    form: &'static MarkedForm,
    place: Place,
    in_list: bool,
}

#[derive(Debug)]
enum Place {
    /// Between calls.
    Text {
        /// An object here is a call without a mark.
        is_bare: bool,
    },
    /// Behind a mark.
    Opened { mark: &'static str },
    /// In front of the next object of a list.
    Item,
    /// In the arguments.
    Arguments {
        span: JsonSpan,
        /// They are part of an object that goes on behind them.
        in_object: bool,
    },
    /// Behind arguments, before the end of their object.
    Rest,
    /// In what else the object says.
    Others { span: JsonSpan },
    /// Behind a call.
    Behind,
}

impl MarkedCalls {
    pub(super) fn new(form: &'static MarkedForm) -> Self {
        Self { form, place: Place::Text { is_bare: form.is_bare }, in_list: false }
    }

    fn text(&mut self, text: &str, is_bare: bool, is_end: bool, sink: &mut Sink) -> Option<usize> {
        if is_bare {
            return self.bare(text, is_end, sink);
        }
        let marks: Vec<&'static str> = [self.form.open, self.form.section].concat();
        match find(text, &marks, is_end) {
            Found::Mark { at, mark } => {
                sink.text(&text[..at]);
                if self.form.open.contains(&mark) {
                    self.place = Place::Opened { mark };
                }
                Some(at + mark.len())
            }
            Found::NoneBefore(0) => None,
            Found::NoneBefore(end) => {
                sink.text(&text[..end]);
                Some(end)
            }
        }
    }

    fn bare(&mut self, text: &str, is_end: bool, sink: &mut Sink) -> Option<usize> {
        let body = text.trim_ascii_start();
        if body.is_empty() && !is_end {
            return None;
        }
        if body.starts_with('{') {
            return self.object(text, text.len() - body.len(), is_end, "", sink);
        }
        self.place = Place::Text { is_bare: false };
        Some(0)
    }

    /// Behind a mark: `prefix` up to the first brace, then an object or a list of them.
    fn opened(&mut self, text: &str, mark: &'static str, is_end: bool, sink: &mut Sink) -> Option<usize> {
        let Some(brace) = text.find('{') else {
            let is_hopeless = is_end || text.len() > MAX_PREFIX_BYTES || self.is_no_prefix(text);
            return if is_hopeless { self.give_back(mark, sink) } else { None };
        };
        let prefix = match self.form.prefix {
            Some(read) => read(&text[..brace]),
            None if ["", "["].contains(&text[..brace].trim()) => Prefix::Json,
            None => Prefix::Other,
        };
        match prefix {
            Prefix::Named { name, id } => {
                sink.call(&name, id);
                self.place = Place::Arguments { span: JsonSpan::default(), in_object: false };
                Some(brace)
            }
            Prefix::Json => {
                self.in_list = text[..brace].contains('[');
                self.object(text, brace, is_end, mark, sink)
            }
            Prefix::Other => self.give_back(mark, sink),
        }
    }

    /// Formats without a prefix have nothing but white space and a bracket before the brace.
    fn is_no_prefix(&self, text: &str) -> bool {
        self.form.prefix.is_none() && !["", "["].contains(&text.trim())
    }

    /// The object at `at`; when it is no call, `mark` is text.
    fn object(&mut self, text: &str, at: usize, is_end: bool, mark: &'static str, sink: &mut Sink) -> Option<usize> {
        match json_call::head(&text[at..]) {
            Head::Call { name, arguments_at } => {
                sink.call(&name, None);
                self.place = Place::Arguments { span: JsonSpan::default(), in_object: true };
                Some(at + arguments_at)
            }
            Head::Whole { name, arguments, end } => {
                sink.whole_call(&name, &arguments);
                self.place = Place::Behind;
                Some(at + end)
            }
            Head::Wait if !is_end => None,
            Head::Wait | Head::NotACall => self.give_back(mark, sink),
        }
    }

    fn give_back(&mut self, mark: &str, sink: &mut Sink) -> Option<usize> {
        sink.text(mark);
        (self.place, self.in_list) = (Place::Text { is_bare: false }, false);
        Some(0)
    }

    fn item(&mut self, text: &str, is_end: bool, sink: &mut Sink) -> Option<usize> {
        let at = text.len() - text.trim_ascii_start().len();
        if text[at..].is_empty() && !is_end { None } else { self.object(text, at, is_end, "", sink) }
    }

    fn behind(&mut self, text: &str, is_end: bool) -> Option<usize> {
        let body = text.trim_ascii_start();
        let blank = text.len() - body.len();
        match body.as_bytes().first() {
            None => return Some(blank),
            Some(b',') if self.in_list => {
                self.place = Place::Item;
                return Some(blank + 1);
            }
            Some(b']') if self.in_list => {
                self.in_list = false;
                return Some(blank + 1);
            }
            Some(_) => {}
        }
        let mark = starts(body, self.form.close, is_end)?;
        if mark.is_none() {
            self.place = Place::Text { is_bare: self.form.is_bare };
        }
        Some(blank + mark.map_or(0, str::len))
    }
}

impl Machine for MarkedCalls {
    fn step(&mut self, text: &str, is_end: bool, sink: &mut Sink) -> Option<usize> {
        match &mut self.place {
            Place::Text { is_bare } => {
                let is_bare = *is_bare;
                self.text(text, is_bare, is_end, sink)
            }
            Place::Opened { mark } => {
                let mark = *mark;
                self.opened(text, mark, is_end, sink)
            }
            Place::Item => self.item(text, is_end, sink),
            Place::Arguments { span, in_object } => {
                let end = span.end_in(text);
                sink.arguments(&text[..end.unwrap_or(text.len())]);
                if end.is_some() {
                    sink.call_end();
                    self.place = if *in_object { Place::Rest } else { Place::Behind };
                }
                Some(end.unwrap_or(text.len()))
            }
            Place::Rest => {
                let body = text.trim_ascii_start();
                let blank = text.len() - body.len();
                let (place, n) = match body.as_bytes().first() {
                    None => (Place::Rest, 0),
                    Some(b'}') => (Place::Behind, 1),
                    Some(b',') => (Place::Others { span: JsonSpan::inside_object() }, 1),
                    Some(_) => (Place::Behind, 0),
                };
                self.place = place;
                Some(blank + n)
            }
            Place::Others { span } => {
                let end = span.end_in(text);
                if end.is_some() {
                    self.place = Place::Behind;
                }
                Some(end.unwrap_or(text.len()))
            }
            Place::Behind => self.behind(text, is_end),
        }
    }

    fn end(&mut self, sink: &mut Sink) {
        if let Place::Opened { mark } = self.place {
            self.give_back(mark, sink);
        }
    }
}
