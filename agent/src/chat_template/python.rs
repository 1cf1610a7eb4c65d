//! What templates take from Python and minijinja has not: methods of texts, lists and objects, filters, and `%` on a text.
//! Each does what Python's of that name does.

use std::borrow::Cow;

use minijinja::{
    Environment, Error, ErrorKind, Output, State, Value, escape_formatter,
    value::{Kwargs, Rest, Tuple, ValueKind, from_args},
};
use minijinja_contrib::pycompat;

use super::json;

/// What a cut text ends with.
const ELLIPSIS: &str = "...";
/// A text longer than asked for by no more than this is not cut.
const TRUNCATE_LEEWAY: usize = 5;

/// Adds all of it.
pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(method);
    environment.add_filter("wordcount", |text: Cow<'_, str>| n_words(&text));
    environment.add_filter("truncate", truncate);
    environment.add_filter("indent", indent);
    environment.add_filter("center", |text: Cow<'_, str>, width: Option<usize>| {
        padded(&text, width.unwrap_or(80), ' ', Side::Both)
    });
    environment.add_filter("striptags", minijinja_contrib::filters::striptags);
    environment.add_filter("replace", |text: Cow<'_, str>, old: Cow<'_, str>, new: Cow<'_, str>, n: Option<i64>| {
        replaced(&text, &old, &new, n)
    });
    environment.add_filter("int", to_int);
    environment.add_filter("float", to_float);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("urlencode", |text: Cow<'_, str>| url_encoded(&text));
    environment.add_test("sequence", is_sequence);
    environment.add_test("iterable", is_iterable);
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    environment.add_function("cycler", |items: Rest<Value>| minijinja_contrib::globals::cycler(items.0));
    environment.set_formatter(print);
}

/// Floats as Python writes them, which is how models saw them.
fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match f64::try_from(value.clone()) {
        Ok(number) if value.kind() == ValueKind::Number && !value.is_integer() => {
            out.write_str(&json::float(number)).map_err(Error::from)
        }
        _ => escape_formatter(out, state, value),
    }
}

/// `int(default=0, base=10)`: what is no number is the default.
fn to_int(value: Value, positional: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let (default, base): (Option<Value>, Option<u32>) = from_args(&positional.0)?;
    let default = default.or(named.get("default")?).unwrap_or(Value::from(0));
    let base = base.or(named.get("base")?).unwrap_or(10);
    named.assert_all_used()?;
    let number = match value.as_str().map(str::trim) {
        Some(text) => {
            let prefixes = [(16, "0x"), (8, "0o"), (2, "0b")];
            let prefix = prefixes.iter().find(|(of, _)| *of == base).map_or("", |(_, prefix)| prefix);
            let digits = text.strip_prefix(prefix).unwrap_or(text);
            let whole = i128::from_str_radix(digits, base.clamp(2, 36)).ok();
            whole.or_else(|| text.parse::<f64>().ok().filter(|number| number.is_finite()).map(|number| number as i128))
        }
        None => f64::try_from(value.clone()).ok().map(|number| number as i128).or(value.is_true().then_some(1)),
    };
    let whole = || i128::try_from(value.clone()).ok().filter(|_| value.is_integer());
    Ok(whole().or(number).map_or(default, Value::from))
}

/// `float(default=0.0)`.
fn to_float(value: Value, default: Option<Value>) -> Value {
    let number = match value.as_str() {
        Some(text) => text.trim().parse::<f64>().ok(),
        None => f64::try_from(value.clone()).ok(),
    };
    number.map_or_else(|| default.unwrap_or(Value::from(0.0)), Value::from)
}

/// `default(default_value='', boolean=False)`.
fn default(value: Value, positional: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let (other, also_false): (Option<Value>, Option<bool>) = from_args(&positional.0)?;
    let other = other.or(named.get("default_value")?).unwrap_or_else(|| Value::from(""));
    let also_false = also_false.or(named.get("boolean")?).unwrap_or(false);
    named.assert_all_used()?;
    Ok(if value.is_undefined() || (also_false && !value.is_true()) { other } else { value })
}

/// `indent(width=4, first=False, blank=False)`. A line break at the end stays: the empty line behind it is a line.
fn indent(text: Cow<'_, str>, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let (width, first, blank): (Option<Value>, Option<bool>, Option<bool>) = from_args(&positional.0)?;
    let width = width.or(named.get("width")?).unwrap_or(Value::from(4));
    let first = first.or(named.get("first")?).unwrap_or(false);
    let blank = blank.or(named.get("blank")?).unwrap_or(false);
    named.assert_all_used()?;
    let indention = match width.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(usize::try_from(width)?),
    };
    let line = |(idx, line): (usize, &str)| match idx {
        0 if first => format!("{indention}{line}"),
        1.. if blank || !line.is_empty() => format!("{indention}{line}"),
        _ => line.to_owned(),
    };
    // Python's `splitlines` leaves out what is behind the last line break, so one more is put there.
    Ok(format!("{text}\n").lines().enumerate().map(line).collect::<Vec<_>>().join("\n"))
}

fn url_encoded(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-~/".contains(&byte);
    text.bytes()
        .map(|byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

/// As in Jinja2: what has a length and can be indexed; a text and an object do, and what is not defined does too.
fn is_sequence(value: &Value) -> bool {
    value.is_undefined() || matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
}

/// As in Jinja2: a text and what is not defined are, `none` is not. Templates ask whether there are tools this way.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && (value.as_str().is_some() || value.try_iter().is_ok())
}

fn method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let own = match (value.as_str(), value.kind()) {
        (Some(text), _) => text_method(text, name, args)?,
        (None, ValueKind::Seq) => list_method(value, name, args)?,
        (None, ValueKind::Map) => map_method(value, name, args)?,
        _ => None,
    };
    match own {
        Some(value) => Ok(value),
        None => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// `None` for a method that is not defined here.
fn text_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let one = || from_args::<(&str,)>(args).map(|(arg,)| arg);
    let value = match name {
        "removeprefix" => text.strip_prefix(one()?).unwrap_or(text).into(),
        "removesuffix" => text.strip_suffix(one()?).unwrap_or(text).into(),
        "split" | "rsplit" => split(text, args, name == "rsplit")?,
        "find" | "rfind" => found(text, args, name == "rfind")?.map_or(Value::from(-1), Value::from),
        "index" | "rindex" => match found(text, args, name == "rindex")? {
            Some(at) => at.into(),
            None => return Err(invalid("substring not found")),
        },
        "partition" => partitioned(text, text.split_once(one()?), one()?, false),
        "rpartition" => partitioned(text, text.rsplit_once(one()?), one()?, true),
        "replace" => {
            let (old, new, n): (&str, &str, Option<i64>) = from_args(args)?;
            replaced(text, old, new, n).into()
        }
        "center" | "ljust" | "rjust" => {
            let (width, fill): (usize, Option<char>) = from_args(args)?;
            let side = match name {
                "center" => Side::Both,
                "ljust" => Side::Right,
                _ => Side::Left,
            };
            padded(text, width, fill.unwrap_or(' '), side).into()
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let (sign, digits) = text.split_at(usize::from(text.starts_with(['+', '-'])));
            (sign.to_owned() + &padded(digits, width.saturating_sub(sign.len()), '0', Side::Left)).into()
        }
        "swapcase" => text.chars().flat_map(swapped).collect::<String>().into(),
        // Folding differs from lower case for a few letters; of those templates may meet, for this one.
        "casefold" => text.to_lowercase().replace('ß', "ss").into(),
        "expandtabs" => {
            let (size,): (Option<usize>,) = from_args(args)?;
            expanded(text, size.unwrap_or(8)).into()
        }
        "startswith" | "endswith" if args.len() > 1 => {
            let (what, range) = args.split_at(1);
            let part = part_of(text, range)?.map_or("", |(_, part)| part);
            let (what,): (&str,) = from_args(what)?;
            (if name == "startswith" { part.starts_with(what) } else { part.ends_with(what) }).into()
        }
        "isdecimal" => (!text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit())).into(),
        "isidentifier" => {
            let is_part = |c: char| c.is_alphanumeric() || c == '_';
            (text.chars().all(is_part) && text.starts_with(|c: char| is_part(c) && !c.is_numeric())).into()
        }
        "istitle" => is_title(text).into(),
        _ => return Ok(None),
    };
    Ok(Some(value))
}

fn list_method(list: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(match name {
        "index" => {
            let (what,): (&Value,) = from_args(args)?;
            let at = list.try_iter()?.position(|item| item == *what);
            Some(at.ok_or_else(|| invalid(&format!("{what} is not in the list")))?.into())
        }
        "copy" => Some(list.try_iter()?.collect()),
        _ => None,
    })
}

fn map_method(map: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    if name != "copy" || map.get_attr(name).is_ok_and(|member| !member.is_undefined()) {
        return Ok(None);
    }
    let () = from_args(args)?;
    Ok(Some(map.clone()))
}

/// `str.split(sep=None, maxsplit=-1)` and `rsplit`.
fn split(text: &str, args: &[Value], from_right: bool) -> Result<Value, Error> {
    let (sep, n, named): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let sep = sep.or(named.get("sep")?).filter(|sep| !sep.is_none());
    let n = n.or(named.get("maxsplit")?).and_then(|n| usize::try_from(n).ok());
    named.assert_all_used()?;
    let pieces = match &sep {
        None => split_at_spaces(text, n.unwrap_or(usize::MAX), from_right),
        Some(sep) => {
            let sep = sep.as_str().filter(|sep| !sep.is_empty()).ok_or_else(|| invalid("empty separator"))?;
            let n = n.map_or(usize::MAX, |n| n.saturating_add(1));
            if from_right {
                let mut pieces: Vec<&str> = text.rsplitn(n, sep).collect();
                pieces.reverse();
                pieces
            } else {
                text.splitn(n, sep).collect()
            }
        }
    };
    Ok(pieces.into_iter().map(Value::from).collect())
}

/// Runs of space separate, and are no piece at either end. What is left after `n` cuts keeps its spaces where nothing was cut.
fn split_at_spaces<'a>(text: &'a str, n: usize, from_right: bool) -> Vec<&'a str> {
    let trimmed = |rest: &'a str| if from_right { rest.trim_end() } else { rest.trim_start() };
    let mut rest = trimmed(text);
    let mut pieces = Vec::new();
    while !rest.is_empty() {
        let cut = if from_right { rest.rfind(char::is_whitespace) } else { rest.find(char::is_whitespace) };
        let Some(at) = cut.filter(|_| pieces.len() < n) else {
            pieces.push(rest);
            break;
        };
        let width = rest[at..].chars().next().map_or(0, char::len_utf8);
        let (piece, left) = if from_right { (&rest[at + width..], &rest[..at]) } else { rest.split_at(at) };
        pieces.push(piece);
        rest = trimmed(left);
    }
    if from_right {
        pieces.reverse();
    }
    pieces
}

/// The character at which `args[0]` is found in the part of the text that the other arguments name.
fn found(text: &str, args: &[Value], from_right: bool) -> Result<Option<usize>, Error> {
    let (what, range) = args.split_at(args.len().min(1));
    let (what,): (&str,) = from_args(what)?;
    let Some((first, part)) = part_of(text, range)? else { return Ok(None) };
    let at = if from_right { part.rfind(what) } else { part.find(what) };
    Ok(at.map(|at| first + part[..at].chars().count()))
}

/// `text[start:end]` by characters, and the first one's index; `None` for a start behind the end.
fn part_of<'a>(text: &'a str, range: &[Value]) -> Result<Option<(usize, &'a str)>, Error> {
    let (start, end): (Option<i64>, Option<i64>) = from_args(range)?;
    let n_chars = text.chars().count();
    let idx = |sent: i64| if sent < 0 { n_chars.saturating_sub(sent.unsigned_abs() as usize) } else { sent as usize };
    let (start, end) = (idx(start.unwrap_or(0)), idx(end.unwrap_or(n_chars as i64)).min(n_chars));
    let byte = |idx: usize| text.char_indices().nth(idx).map_or(text.len(), |(at, _)| at);
    Ok((start <= end).then(|| (start, &text[byte(start)..byte(end)])))
}

/// `(before, sep, after)`; the whole text stands on one side of two empty ones if it has no `sep`.
fn partitioned(text: &str, halves: Option<(&str, &str)>, sep: &str, from_right: bool) -> Value {
    let parts = match halves {
        Some((before, after)) => [before, sep, after],
        None if from_right => ["", "", text],
        None => [text, "", ""],
    };
    Value::from(Tuple::from(parts.map(Value::from)))
}

fn replaced(text: &str, old: &str, new: &str, n: Option<i64>) -> String {
    match n.and_then(|n| usize::try_from(n).ok()) {
        Some(n) => text.replacen(old, new, n),
        None => text.replace(old, new),
    }
}

enum Side {
    Left,
    Right,
    Both,
}

fn padded(text: &str, width: usize, fill: char, side: Side) -> String {
    let missing = width.saturating_sub(text.chars().count());
    let left = match side {
        Side::Left => missing,
        Side::Right => 0,
        // Python's rule for an odd number.
        Side::Both => missing / 2 + (missing & width & 1),
    };
    let fill = |n| std::iter::repeat_n(fill, n).collect::<String>();
    fill(left) + text + &fill(missing - left)
}

fn swapped(c: char) -> Vec<char> {
    if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
}

fn expanded(text: &str, size: usize) -> String {
    let (mut out, mut column) = (String::new(), 0);
    for c in text.chars() {
        match c {
            '\t' if size == 0 => {}
            '\t' => {
                let n = size - column % size;
                out.extend(std::iter::repeat_n(' ', n));
                column += n;
            }
            '\n' | '\r' => {
                out.push(c);
                column = 0;
            }
            c => {
                out.push(c);
                column += 1;
            }
        }
    }
    out
}

/// Every word begins with an upper case letter and goes on without.
fn is_title(text: &str) -> bool {
    let (mut after_letter, mut any) = (false, false);
    for c in text.chars() {
        if (c.is_uppercase() && after_letter) || (c.is_lowercase() && !after_letter) {
            return false;
        }
        after_letter = c.is_uppercase() || c.is_lowercase();
        any |= after_letter;
    }
    any
}

/// Runs of `\w`.
fn n_words(text: &str) -> usize {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty()).count()
}

/// `truncate(length=255, killwords=False, end='...', leeway=5)`.
fn truncate(text: Cow<'_, str>, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let (length, cuts_words, end, leeway): (Option<usize>, Option<bool>, Option<String>, Option<usize>) =
        from_args(&positional.0)?;
    let length = length.or(named.get("length")?).unwrap_or(255);
    let cuts_words = cuts_words.or(named.get("killwords")?).unwrap_or(false);
    let end = end.or(named.get("end")?).unwrap_or_else(|| ELLIPSIS.to_owned());
    let leeway = leeway.or(named.get("leeway")?).unwrap_or(TRUNCATE_LEEWAY);
    named.assert_all_used()?;
    if text.chars().count() <= length + leeway {
        return Ok(text.into_owned());
    }
    let kept: String = text.chars().take(length.saturating_sub(end.chars().count())).collect();
    let whole_words = kept.rsplit_once(' ').map_or(kept.as_str(), |(words, _)| words);
    Ok(if cuts_words { kept } else { whole_words.to_owned() } + &end)
}

fn invalid(problem: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, problem.to_owned())
}
