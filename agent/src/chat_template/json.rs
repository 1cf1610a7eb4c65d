//! `tojson` as chat templates have it: Python's `json.dumps`, to the byte. Models were trained on its spacing and its floats.

use std::fmt::Write;

use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, Rest, ValueKind},
};

/// How a value is written.
struct Style {
    ensure_ascii: bool,
    /// A level's indentation; `None` is everything on one line.
    indent: Option<String>,
    between_items: String,
    behind_key: String,
    sort_keys: bool,
}

/// The filter: `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn to_json(value: &Value, positional: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let mut sent = [const { None }; 4];
    for (name, sent) in names.iter().zip(&mut sent) {
        *sent = options.get::<Option<Value>>(name)?;
    }
    options.assert_all_used()?;
    for (sent, value) in sent.iter_mut().zip(positional.0) {
        *sent = Some(value);
    }
    let [ensure_ascii, indent, separators, sort_keys] = sent.map(|sent| sent.unwrap_or(Value::from(())));
    let indent = indent_of(&indent);
    let (between_items, behind_key) = separators_of(&separators, indent.is_some())?;
    let (ensure_ascii, sort_keys) = (ensure_ascii.is_true(), sort_keys.is_true());
    let style = Style { ensure_ascii, indent, between_items, behind_key, sort_keys };
    let mut out = String::new();
    style.write(&mut out, value, 0)?;
    Ok(out)
}

/// A number of spaces, or what is put there.
fn indent_of(indent: &Value) -> Option<String> {
    let spaces = || Some(" ".repeat(indent.as_i64()?.max(0) as usize));
    indent.as_str().map(str::to_owned).or_else(spaces)
}

fn separators_of(separators: &Value, is_indented: bool) -> Result<(String, String), Error> {
    if separators.is_none() {
        return Ok((if is_indented { "," } else { ", " }.to_owned(), ": ".to_owned()));
    }
    let sent: Vec<Value> = separators.try_iter()?.collect();
    match &sent[..] {
        [items, keys] => Ok((items.to_string(), keys.to_string())),
        _ => Err(not_json("separators are two texts: between items and behind keys")),
    }
}

impl Style {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)?),
            ValueKind::String => self.write_text(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.write_items(out, value.try_iter()?.collect(), depth)?,
            ValueKind::Map => self.write_members(out, members(value)?, depth)?,
            other => return Err(not_json(&format!("{other} is not JSON"))),
        }
        Ok(())
    }

    fn write_items(&self, out: &mut String, items: Vec<Value>, depth: usize) -> Result<(), Error> {
        if items.is_empty() {
            out.push_str("[]");
            return Ok(());
        }
        out.push('[');
        for (idx, item) in items.iter().enumerate() {
            self.begin_entry(out, idx, depth);
            self.write(out, item, depth + 1)?;
        }
        self.break_line(out, depth);
        out.push(']');
        Ok(())
    }

    fn write_members(&self, out: &mut String, mut members: Vec<(String, Value)>, depth: usize) -> Result<(), Error> {
        if members.is_empty() {
            out.push_str("{}");
            return Ok(());
        }
        if self.sort_keys {
            members.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        out.push('{');
        for (idx, (key, value)) in members.iter().enumerate() {
            self.begin_entry(out, idx, depth);
            self.write_text(out, key);
            out.push_str(&self.behind_key);
            self.write(out, value, depth + 1)?;
        }
        self.break_line(out, depth);
        out.push('}');
        Ok(())
    }

    fn begin_entry(&self, out: &mut String, idx: usize, depth: usize) {
        if idx > 0 {
            out.push_str(&self.between_items);
        }
        self.break_line(out, depth + 1);
    }

    fn break_line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write_text(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => escape(out, c),
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// As UTF-16, which is what JSON's escapes are.
fn escape(out: &mut String, c: char) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        let _ = write!(out, "\\u{unit:04x}");
    }
}

fn members(value: &Value) -> Result<Vec<(String, Value)>, Error> {
    let member = |key: Value| {
        let name = match key.kind() {
            ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
            ValueKind::None => "null".to_owned(),
            ValueKind::Bool => key.is_true().to_string(),
            ValueKind::Number => number(&key)?,
            other => return Err(not_json(&format!("{other} is no key"))),
        };
        Ok((name, value.get_item(&key)?))
    };
    value.try_iter()?.map(member).collect()
}

fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() { Ok(value.to_string()) } else { Ok(float(f64::try_from(value.clone())?)) }
}

/// Python's `repr`: the shortest digits that are read back as the same number, with an exponent below 1e-4 and from 1e16 on.
pub(super) fn float(number: f64) -> String {
    if !number.is_finite() {
        let name = if number.is_nan() { "NaN" } else { "Infinity" };
        return if number < 0.0 { format!("-{name}") } else { name.to_owned() };
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').expect("that is how Rust writes it");
    match exponent.parse::<i32>().expect("an exponent is a number") {
        -4..16 if number.fract() == 0.0 => format!("{number:.1}"),
        -4..16 => format!("{number}"),
        exponent => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

fn not_json(problem: &str) -> Error {
    Error::new(ErrorKind::BadSerialization, problem.to_owned())
}
