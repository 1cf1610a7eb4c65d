//! Calls written as Python: `[f(a=1, b="x"), g()]`, alone at the beginning of an answer (Llama) or between marks. A call
//! is known when its parenthesis closes; its keyword arguments become JSON.

use super::{
    Machine,
    coerce::quoted,
    marked::{LLAMA, MarkedCalls},
    marks::{Found, find, starts},
    sink::Sink,
};

/// The marks around a list of calls; none: the list begins the answer.
#[derive(Debug)]
pub(super) struct PythonicForm {
    open: &'static [&'static str],
    close: &'static [&'static str],
}

pub(super) static MARKED: PythonicForm = PythonicForm { open: &["<|tool_call_start|>"], close: &["<|tool_call_end|>"] };

static BARE: PythonicForm = PythonicForm { open: &[], close: &[] };

/// Literals inside each other at most: far more than any argument has.
const MAX_DEPTH: u32 = 64;

/// Llama 3 writes JSON or Python: the first character tells.
#[derive(Debug, Default)]
pub(super) struct Llama {
    chosen: Option<Box<dyn Machine>>,
}

impl Machine for Llama {
    fn step(&mut self, text: &str, is_end: bool, sink: &mut Sink) -> Option<usize> {
        if self.chosen.is_none() {
            let first = text.trim_ascii_start().chars().next();
            self.chosen = match first {
                None if !is_end => return None,
                Some('[') => Some(Box::new(PythonicCalls::new(&BARE))),
                _ => Some(Box::new(MarkedCalls::new(&LLAMA))),
            };
        }
        self.chosen.as_mut()?.step(text, is_end, sink)
    }

    fn end(&mut self, sink: &mut Sink) {
        if let Some(machine) = &mut self.chosen {
            machine.end(sink);
        }
    }
}

/// Follows one answer.
#[derive(Debug)]
pub(super) struct PythonicCalls {
    form: &'static PythonicForm,
    place: Place,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Text,
    /// In front of a list, behind this mark.
    Opened {
        mark: &'static str,
    },
    /// Behind a call of the list.
    Behind,
    /// Behind the list.
    Closed,
}

impl PythonicCalls {
    pub(super) fn new(form: &'static PythonicForm) -> Self {
        let place = if form.open.is_empty() { Place::Opened { mark: "" } } else { Place::Text };
        Self { form, place }
    }

    /// A call that begins at `at`, behind a bracket or a comma.
    fn call(&mut self, text: &str, at: usize, mark: &str, is_end: bool, sink: &mut Sink) -> Option<usize> {
        match read_call(&text[at..]) {
            Read::Call { name, arguments, end } => {
                sink.whole_call(&name, &arguments);
                self.place = Place::Behind;
                Some(at + end)
            }
            Read::Wait if !is_end => None,
            Read::Wait | Read::NotACall => {
                sink.text(mark);
                self.place = Place::Text;
                Some(0)
            }
        }
    }
}

impl Machine for PythonicCalls {
    fn step(&mut self, text: &str, is_end: bool, sink: &mut Sink) -> Option<usize> {
        let body = text.trim_ascii_start();
        let blank = text.len() - body.len();
        match (self.place, body.as_bytes().first()) {
            (Place::Text, _) => match find(text, self.form.open, is_end) {
                Found::Mark { at, mark } => {
                    sink.text(&text[..at]);
                    self.place = Place::Opened { mark };
                    Some(at + mark.len())
                }
                Found::NoneBefore(0) => None,
                Found::NoneBefore(end) => {
                    sink.text(&text[..end]);
                    Some(end)
                }
            },
            (Place::Opened { .. } | Place::Behind, None) if !is_end => None,
            (Place::Opened { mark }, Some(b'[')) => self.call(text, blank + 1, mark, is_end, sink),
            (Place::Opened { mark }, _) => {
                sink.text(mark);
                self.place = Place::Text;
                Some(0)
            }
            (Place::Behind, Some(b',')) => self.call(text, blank + 1, "", is_end, sink),
            (Place::Behind, first) => {
                self.place = Place::Closed;
                Some(blank + usize::from(first == Some(&b']')))
            }
            (Place::Closed, None) => Some(blank),
            (Place::Closed, _) => {
                let mark = starts(body, self.form.close, is_end)?;
                self.place = Place::Text;
                Some(blank + mark.map_or(0, str::len))
            }
        }
    }

    fn end(&mut self, sink: &mut Sink) {
        if let Place::Opened { mark } = self.place {
            sink.text(mark);
        }
    }
}

/// What the beginning of a text says.
enum Read {
    Wait,
    Call { name: String, arguments: String, end: usize },
    NotACall,
}

fn read_call(text: &str) -> Read {
    let body = text.trim_ascii_start();
    let blank = text.len() - body.len();
    let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
    let name_len = body.find(|c| !is_name(c)).unwrap_or(body.len());
    match body[name_len..].bytes().next() {
        None => return Read::Wait,
        Some(b'(') if name_len > 0 && !body.starts_with(|c: char| c.is_ascii_digit()) => {}
        Some(_) => return Read::NotACall,
    }
    let Some(len) = closing(&body[name_len..]) else { return Read::Wait };
    let inside = &body[name_len + 1..name_len + len - 1];
    match keyword_arguments(inside) {
        Some(arguments) => Read::Call { name: body[..name_len].to_owned(), arguments, end: blank + name_len + len },
        None => Read::NotACall,
    }
}

/// Bytes up to and including the parenthesis that closes the first one; brackets in strings do not count.
fn closing(text: &str) -> Option<usize> {
    let (mut depth, mut quote, mut is_escaped) = (0u32, None, false);
    for (at, byte) in text.bytes().enumerate() {
        match (quote, byte) {
            _ if is_escaped => is_escaped = false,
            (Some(_), b'\\') => is_escaped = true,
            (Some(open), _) if byte == open => quote = None,
            (Some(_), _) => {}
            (None, b'"' | b'\'') => quote = Some(byte),
            (None, b'(' | b'[' | b'{') => depth += 1,
            (None, b')' | b']' | b'}') => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            (None, _) => {}
        }
    }
    None
}

/// `a=1, b="x"` as a JSON object.
fn keyword_arguments(text: &str) -> Option<String> {
    let mut reader = Reader { rest: text, depth: 0 };
    let mut json = String::from("{");
    while reader.peek().is_some() {
        let len = reader.rest.find('=')?;
        let key = reader.rest[..len].trim();
        if key.is_empty() || !key.chars().all(|c| c.is_alphanumeric() || c == '_') {
            return None;
        }
        reader.rest = &reader.rest[len + 1..];
        if json.len() > 1 {
            json.push_str(", ");
        }
        json.push_str(&quoted(key));
        json.push_str(": ");
        reader.value(&mut json)?;
        if reader.peek().is_some() {
            reader.expect(',')?;
        }
    }
    json.push('}');
    Some(json)
}

/// A Python literal as JSON text; `None` if it is none.
pub(super) fn literal(text: &str) -> Option<String> {
    let mut reader = Reader { rest: text, depth: 0 };
    let mut json = String::new();
    reader.value(&mut json)?;
    reader.peek().is_none().then_some(json)
}

/// Reads Python literals.
struct Reader<'a> {
    rest: &'a str,
    depth: u32,
}

impl Reader<'_> {
    fn peek(&mut self) -> Option<char> {
        self.rest = self.rest.trim_start();
        self.rest.chars().next()
    }

    fn expect(&mut self, c: char) -> Option<()> {
        (self.peek()? == c).then(|| self.rest = &self.rest[c.len_utf8()..])
    }

    fn value(&mut self, json: &mut String) -> Option<()> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        match self.peek()? {
            quote @ ('"' | '\'') => json.push_str(&quoted(&self.string(quote)?)),
            '[' => self.list('[', ']', json)?,
            '(' => self.list('(', ')', json)?,
            '{' => self.dict(json)?,
            _ => json.push_str(&self.word()?),
        }
        self.depth -= 1;
        Some(())
    }

    fn list(&mut self, open: char, close: char, json: &mut String) -> Option<()> {
        self.expect(open)?;
        json.push('[');
        let mut is_first = true;
        while self.peek()? != close {
            if !std::mem::take(&mut is_first) {
                json.push_str(", ");
            }
            self.value(json)?;
            if self.peek()? != close {
                self.expect(',')?;
            }
        }
        json.push(']');
        self.expect(close)
    }

    fn dict(&mut self, json: &mut String) -> Option<()> {
        self.expect('{')?;
        json.push('{');
        let mut is_first = true;
        while self.peek()? != '}' {
            if !std::mem::take(&mut is_first) {
                json.push_str(", ");
            }
            let quote = self.peek().filter(|c| "\"'".contains(*c))?;
            json.push_str(&quoted(&self.string(quote)?));
            self.expect(':')?;
            json.push_str(": ");
            self.value(json)?;
            if self.peek()? != '}' {
                self.expect(',')?;
            }
        }
        json.push('}');
        self.expect('}')
    }

    fn string(&mut self, quote: char) -> Option<String> {
        self.expect(quote)?;
        let mut text = String::new();
        let mut chars = self.rest.char_indices();
        while let Some((at, c)) = chars.next() {
            match c {
                _ if c == quote => {
                    self.rest = &self.rest[at + 1..];
                    return Some(text);
                }
                '\\' => match chars.next()?.1 {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'x' => text.push(code(&mut chars, 2)?),
                    'u' => text.push(code(&mut chars, 4)?),
                    c @ ('\\' | '\'' | '"') => text.push(c),
                    other => text.extend(['\\', other]),
                },
                _ => text.push(c),
            }
        }
        None
    }

    /// A number, or a word of Python or JSON.
    fn word(&mut self) -> Option<String> {
        let len = self.rest.find([',', ')', ']', '}', ':', ' ', '\n']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(len);
        self.rest = rest;
        let json = match word {
            "True" | "true" => "true",
            "False" | "false" => "false",
            "None" | "null" => "null",
            _ => word.strip_prefix('+').unwrap_or(word),
        };
        serde_json::from_str::<serde::de::IgnoredAny>(json).is_ok().then(|| json.to_owned())
    }
}

/// A character by the hexadecimal digits that follow.
fn code(chars: &mut std::str::CharIndices<'_>, n_digits: usize) -> Option<char> {
    let digits: String = chars.by_ref().take(n_digits).map(|(_, c)| c).collect();
    char::from_u32(u32::from_str_radix(&digits, 16).ok()?)
}
