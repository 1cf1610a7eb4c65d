//! The fields of one JSON request body, taken one by one, so that every mistake names its field and nothing that was
//! sent is ignored: `finish` refuses what nobody took. Knows no endpoint.

use std::{
    collections::BTreeMap,
    ops::{Range, RangeInclusive},
};

use bytes::Bytes;
use serde::de::DeserializeOwned;

use crate::http::{
    json_object::{Members, NamesOnce},
    names,
};

/// OpenAI's word for a value that is not accepted and has no more exact word.
pub(crate) const INVALID_VALUE: &str = "invalid_value";
/// What to do about a parameter that resembles none of this endpoint's.
const REMOVE_IT: &str = "remove it";
/// Letters missing, added, exchanged or swapped in a name that is still taken for a misspelt one.
const MAX_SLIPS: usize = 2;
/// Longest reason in an error message: serde repeats a wrong string whole, however long it is.
const REASON_CHARS: usize = 200;

/// The fields nobody has taken yet. Values stay where they are in the body: a long prompt is copied once, when it is taken.
#[derive(Debug)]
pub(crate) struct Fields {
    body: Bytes,
    left: BTreeMap<String, Range<usize>>,
    /// What the endpoint asked for: the names that a misspelt one may have meant.
    known: Vec<&'static str>,
}

/// What is wrong with a body.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum FieldError {
    /// Not a JSON object.
    #[error("the body is not a JSON object: {reason}")]
    Malformed {
        /// Where and why.
        reason: String,
    },
    /// A field that must be there.
    #[error("`{field}` is missing")]
    Missing {
        /// Its name.
        field: String,
    },
    /// A field sent more than once.
    #[error("`{field}` is given twice: send it once")]
    Twice {
        /// Path of the value, e.g. `messages[1].role`.
        field: String,
    },
    /// A value of another type.
    #[error("`{path}` is wrong: {reason}")]
    WrongType {
        /// Path of the value, e.g. `messages[1].role`.
        path: String,
        /// What was found and expected.
        reason: String,
    },
    /// A value of the right type that is not one of those known.
    #[error("`{path}` is wrong: {reason}")]
    WrongValue {
        /// Path of the value, e.g. `messages[1].role`.
        path: String,
        /// What was found and what is known.
        reason: String,
    },
    /// A number outside its range.
    #[error("`{field}` must be {expected}, got {found}")]
    OutOfRange {
        /// Its name.
        field: String,
        /// The range in words.
        expected: String,
        /// The value.
        found: String,
        /// OpenAI's word for it.
        code: &'static str,
    },
    /// Fields this endpoint does not have.
    #[error("unknown or unsupported parameter `{field}`: {advice} (this server never ignores a parameter)")]
    Unknown {
        /// The first of them.
        field: String,
        /// What to do about it.
        advice: String,
    },
}

impl FieldError {
    /// The field at fault.
    pub(crate) fn param(&self) -> Option<&str> {
        match self {
            Self::Malformed { .. } => None,
            Self::WrongType { path, .. } | Self::WrongValue { path, .. } => Some(path),
            Self::Missing { field }
            | Self::Twice { field }
            | Self::OutOfRange { field, .. }
            | Self::Unknown { field, .. } => Some(field),
        }
    }
}

impl Fields {
    /// The fields of a body that must be one JSON object.
    pub(crate) fn parse(body: Bytes) -> Result<Self, FieldError> {
        let malformed = |reason: String| FieldError::Malformed { reason };
        let text = std::str::from_utf8(&body)
            .map_err(|error| malformed(format!("not UTF-8 at byte {}", error.valid_up_to())))?;
        let members = Members::parse(text).map_err(|error| {
            let reason = error.to_string();
            match named(&reason, TWICE) {
                Some(field) => FieldError::Twice { field: field.to_owned() },
                None => malformed(reason),
            }
        })?;
        let left = members.places(text).collect();
        Ok(Self { body, left, known: vec![] })
    }

    /// The JSON text of a field nobody has taken.
    fn raw(&self, place: &Range<usize>) -> &str {
        std::str::from_utf8(&self.body[place.clone()]).expect("the body is UTF-8 and values end at its characters")
    }

    /// The JSON text of a field that nobody has taken, which stays where it is.
    pub(crate) fn json(&self, field: &str) -> Option<Bytes> {
        self.left.get(field).map(|place| self.body.slice(place.clone()))
    }

    /// Whether a field was sent and not taken yet; `null` is none.
    pub(crate) fn has(&self, field: &str) -> bool {
        self.left.get(field).is_some_and(|place| self.raw(place) != "null")
    }

    /// Takes a field; absent and `null` are the same.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, field: &'static str) -> Result<Option<T>, FieldError> {
        self.known.push(field);
        let Some(place) = self.left.remove(field) else { return Ok(None) };
        let raw = self.raw(&place);
        if raw == "null" {
            return Ok(None);
        }
        if names::may_be_there_twice(raw) {
            read::<NamesOnce>(field, raw, &mut serde_json::Deserializer::from_str(raw))?;
        }
        let mut json = serde_json::Deserializer::from_str(raw);
        let value = read(field, raw, &mut json)?;
        // A 128-bit integer is read off the front of `1.5`: what is left over says that it was none.
        match json.end() {
            Ok(()) => Ok(Some(value)),
            Err(_) => {
                let reason = format!("expected an integer, got {}", excerpt(raw));
                Err(FieldError::WrongType { path: field.to_owned(), reason })
            }
        }
    }

    /// Takes an object, or a word in its place. serde would also fill one by an array, member by member.
    pub(crate) fn object<T: DeserializeOwned>(&mut self, field: &'static str) -> Result<Option<T>, FieldError> {
        if self.left.get(field).is_some_and(|place| self.raw(place).starts_with('[')) {
            let reason = "expected an object, got an array".to_owned();
            return Err(FieldError::WrongType { path: field.to_owned(), reason });
        }
        self.take(field)
    }

    /// Takes a field that must be there.
    pub(crate) fn require<T: DeserializeOwned>(&mut self, field: &'static str) -> Result<T, FieldError> {
        self.take(field)?.ok_or_else(|| FieldError::Missing { field: field.to_owned() })
    }

    /// Takes a value that must satisfy `accepts`, described as `expected`.
    pub(crate) fn checked<T>(
        &mut self,
        field: &'static str,
        expected: &str,
        accepts: impl Fn(&T) -> bool,
    ) -> Result<Option<T>, FieldError>
    where
        T: DeserializeOwned + std::fmt::Display,
    {
        match self.take::<T>(field)? {
            Some(value) if !accepts(&value) => Err(FieldError::OutOfRange {
                field: field.to_owned(),
                expected: expected.to_owned(),
                found: excerpt(&value.to_string()),
                code: INVALID_VALUE,
            }),
            value => Ok(value),
        }
    }

    /// Takes a number and checks its range.
    pub(crate) fn number<T: Bounded>(
        &mut self,
        field: &'static str,
        range: RangeInclusive<T>,
    ) -> Result<Option<T>, FieldError> {
        // The range comes first: `-1` is a number like `0`, though it is of no unsigned type.
        let raw = self.left.get(field).map(|place| self.raw(place));
        let sent = raw.and_then(|raw| raw.parse::<f64>().ok().map(|sent| (sent, raw)));
        if let Some((sent, raw)) = sent
            && let Some(code) = T::outside(&range, sent)
        {
            let (expected, found) = (T::expected(&range, sent), excerpt(raw));
            return Err(FieldError::OutOfRange { field: field.to_owned(), expected, found, code });
        }
        self.take(field)
    }

    /// Refuses what nobody took.
    pub(crate) fn finish(self) -> Result<(), FieldError> {
        match self.left.iter().find(|(_, place)| self.raw(place) != "null") {
            Some((field, _)) => {
                let field = field.clone();
                let advice = match nearest(&field, &self.known) {
                    Some(meant) => format!("did you mean `{meant}`?"),
                    None => REMOVE_IT.to_owned(),
                };
                Err(FieldError::Unknown { field, advice })
            }
            None => Ok(()),
        }
    }
}

/// A number with a range that clients are told about.
pub(crate) trait Bounded: DeserializeOwned + PartialEq + Copy + Into<f64> + std::fmt::Display {
    /// The largest value of the type: a range that ends there has no upper end worth telling, unless it was passed.
    const MAX: Self;
    /// OpenAI's words for a value below and above the range.
    const OUTSIDE: [&'static str; 2];

    /// The word for `sent`, if it lies outside.
    fn outside(range: &RangeInclusive<Self>, sent: f64) -> Option<&'static str> {
        let [below, above] = Self::OUTSIDE;
        match sent {
            _ if sent < (*range.start()).into() => Some(below),
            _ if sent > (*range.end()).into() => Some(above),
            _ => None,
        }
    }

    /// The range in words.
    fn expected(range: &RangeInclusive<Self>, sent: f64) -> String {
        match range.end() {
            end if *end == Self::MAX && sent <= (*end).into() => format!("{} or more", range.start()),
            end => format!("between {} and {end}", range.start()),
        }
    }
}

const INTEGER: [&str; 2] = ["integer_below_min_value", "integer_above_max_value"];
const DECIMAL: [&str; 2] = ["decimal_below_min_value", "decimal_above_max_value"];

impl Bounded for u8 {
    const MAX: Self = Self::MAX;
    const OUTSIDE: [&'static str; 2] = INTEGER;
}

impl Bounded for u32 {
    const MAX: Self = Self::MAX;
    const OUTSIDE: [&'static str; 2] = INTEGER;
}

impl Bounded for f32 {
    const MAX: Self = Self::MAX;
    const OUTSIDE: [&'static str; 2] = DECIMAL;
}

/// What serde says before the name of a field that is there twice.
const TWICE: &str = "duplicate field `";

fn read<T: DeserializeOwned>(
    field: &str,
    raw: &str,
    json: &mut serde_json::Deserializer<serde_json::de::StrRead<'_>>,
) -> Result<T, FieldError> {
    serde_path_to_error::deserialize(json).map_err(|error| mistake(field, raw, &error))
}

/// What serde says about the value of `field`, in the words of JSON and of OpenAI's clients.
fn mistake(field: &str, raw: &str, error: &serde_path_to_error::Error<serde_json::Error>) -> FieldError {
    let path = joined(field, &error.path().to_string());
    // serde_json ends its messages with a position inside the field's own text, which would mislead.
    let message = error.inner().to_string();
    let reason = message.rsplit_once(" at line ").map_or(message.as_str(), |(reason, _)| reason);
    if let Some(name) = named(reason, "missing field `") {
        return FieldError::Missing { field: joined(&path, name) };
    }
    // The path of a known field's name ends in it, unless serde read the object through a buffer.
    let nested = |name: &str| match path.strip_suffix(name) {
        Some(outer) if outer.ends_with('.') => path.clone(),
        _ => joined(&path, name),
    };
    if let Some(name) = named(reason, TWICE) {
        return FieldError::Twice { field: nested(name) };
    }
    if let Some(name) = named(reason, "unknown field `") {
        return FieldError::Unknown { field: nested(name), advice: REMOVE_IT.to_owned() };
    }
    if reason.starts_with("unknown variant") {
        return FieldError::WrongValue { path, reason: excerpt(reason) };
    }
    let reason = if reason.contains("invalid type") || reason.contains("invalid value") {
        excerpt(&in_json_words(reason))
    } else {
        format!("{}, got {}", in_json_words(reason), excerpt(raw))
    };
    FieldError::WrongType { path, reason }
}

/// The known name that differs from `field` by a slip or two.
fn nearest(field: &str, known: &[&'static str]) -> Option<&'static str> {
    let slips = |name: &str| strsim::osa_distance(field, name);
    known.iter().copied().filter(|name| slips(name) <= MAX_SLIPS).min_by_key(|name| slips(name))
}

/// Path of what lies at `inner` in `outer`; serde writes `.` for the value itself.
fn joined(outer: &str, inner: &str) -> String {
    match inner {
        "." => outer.to_owned(),
        _ if inner.starts_with('[') => format!("{outer}{inner}"),
        _ => format!("{outer}.{inner}"),
    }
}

/// The name in back quotes that follows `prefix`.
fn named<'a>(reason: &'a str, prefix: &str) -> Option<&'a str> {
    reason.strip_prefix(prefix)?.split('`').next()
}

/// serde names Rust's types; a client knows JSON's.
fn in_json_words(reason: &str) -> String {
    let Some((found, expected)) = reason.rsplit_once("expected ") else {
        return reason.to_owned();
    };
    let expected = match expected {
        "u8" | "u32" | "u64" => "an integer, 0 or more",
        "i64" | "i128" => "an integer",
        "f32" | "f64" => "a number",
        "a sequence" => "an array",
        "a map" => "an object",
        _ if expected.starts_with("struct ") => "an object",
        other => other,
    };
    let found = found.replace("type: sequence", "type: array").replace("type: map", "type: object");
    format!("{}expected {expected}", found.replace("floating point", "number"))
}

fn excerpt(text: &str) -> String {
    match text.char_indices().nth(REASON_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(json: &str) -> Fields {
        Fields::parse(Bytes::copy_from_slice(json.as_bytes())).unwrap()
    }

    #[test]
    fn a_name_that_is_there_twice_is_refused_at_any_depth() {
        let twice = |json: &str| Fields::parse(Bytes::copy_from_slice(json.as_bytes())).unwrap_err();
        assert_eq!(twice(r#"{"n": 1, "m": 2, "n": 1}"#).to_string(), "`n` is given twice: send it once");
        assert_eq!(twice(r#"{"n": 1, "\u006e": 2}"#).param(), Some("n"), "escapes make no other name");
        let mut body =
            fields(r#"{"bias": {"7": 1, "7": 2}, "list": [{"a": {"b": 1, "b": 1}}], "null": {"a": 1, "b": 2}}"#);
        type Bias = BTreeMap<String, f32>;
        assert_eq!(body.take::<Bias>("bias").unwrap_err(), FieldError::Twice { field: "bias.7".into() });
        let nested = body.take::<Vec<serde_json::Value>>("list").unwrap_err();
        assert_eq!(nested.param(), Some("list[0].a.b"));
        assert_eq!(body.take::<Bias>("null").unwrap().unwrap().len(), 2);
    }

    #[test]
    fn an_array_is_no_object_though_it_would_fill_one() {
        #[derive(Debug, PartialEq, serde::Deserialize)]
        struct Two(u32, u32);
        let mut body = fields(r#"{"a": [1, 2], "b": [1, 2]}"#);
        assert_eq!(body.take::<Two>("a"), Ok(Some(Two(1, 2))));
        assert_eq!(body.object::<Two>("b").unwrap_err().param(), Some("b"));
    }

    #[test]
    fn what_nobody_takes_is_refused_by_name_unless_null() {
        let mut body = fields(r#"{"a": 1, "guided_json": {}, "b": null}"#);
        assert_eq!(body.take::<u32>("a"), Ok(Some(1)));
        assert_eq!(body.finish().unwrap_err().param(), Some("guided_json"));
        assert_eq!(fields(r#"{"b": null}"#).finish(), Ok(()));
    }

    #[test]
    fn a_misspelt_name_is_told_the_right_one() {
        for (sent, advice) in [
            ("temprature", "did you mean `temperature`?"),
            ("max_token", "did you mean `max_tokens`?"),
            ("max_tokes", "did you mean `max_tokens`?"),
            ("guided_json", "remove it"),
        ] {
            let mut body = fields(&format!(r#"{{"{sent}": 1}}"#));
            for name in ["temperature", "max_tokens", "min_tokens"] {
                assert_eq!(body.take::<u32>(name), Ok(None));
            }
            let error = body.finish().unwrap_err().to_string();
            assert!(error.contains(&format!("`{sent}`: {advice}")), "{error}");
        }
    }

    #[test]
    fn a_wrong_type_names_the_path_and_shows_the_value() {
        let error = fields(r#"{"t": "hot"}"#).take::<f32>("t").unwrap_err();
        assert_eq!(error.to_string(), r#"`t` is wrong: invalid type: string "hot", expected a number"#);
        let error = fields(r#"{"m": [[1], [2, "x"]]}"#).take::<Vec<Vec<u32>>>("m").unwrap_err();
        assert_eq!(error.param(), Some("m[1][1]"));
    }

    #[derive(Debug, PartialEq, serde::Deserialize)]
    #[serde(deny_unknown_fields, rename_all = "lowercase")]
    enum Kind {
        Round { size: u32 },
    }

    #[test]
    fn mistakes_inside_a_value_are_told_in_the_words_of_json() {
        for (value, param, message) in [
            ("{}", "k", "`k` is wrong: expected value, got {}"),
            (r#"[]"#, "k", "`k` is wrong: expected value, got []"),
            (r#"{"square": {}}"#, "k", "`k` is wrong: unknown variant `square`, expected `round`"),
            (r#"{"round": {}}"#, "k.round.size", "`k.round.size` is missing"),
            (r#"{"round": {"size": 1, "hue": 2}}"#, "k.round.hue", "unknown or unsupported parameter `k.round.hue`"),
            (r#"{"round": {"size": []}}"#, "k.round.size", "invalid type: array, expected an integer, 0 or more"),
            (r#"{"round": {"size": 1.5}}"#, "k.round.size", "invalid type: number `1.5`, expected an integer"),
            (r#"{"round": 7}"#, "k.round", "invalid type: integer `7`, expected an object"),
        ] {
            let error = fields(&format!(r#"{{"k": {value}}}"#)).take::<Kind>("k").unwrap_err();
            assert_eq!(error.param(), Some(param), "{error}");
            assert!(error.to_string().contains(message), "{error}");
        }
    }

    #[test]
    fn a_number_out_of_range_says_the_range_and_openais_word_for_it() {
        let refused = |json: &str, range| match fields(json).number("n", range).unwrap_err() {
            FieldError::OutOfRange { expected, found, code, .. } => (expected, found, code),
            other => panic!("{other:?}"),
        };
        let told = |expected: &str, found: &str, code| (expected.to_owned(), found.to_owned(), code);
        assert_eq!(refused(r#"{"n": 9}"#, 1..=8_u32), told("between 1 and 8", "9", "integer_above_max_value"));
        for below in ["-1", "0", "-1e300"] {
            let code = "integer_below_min_value";
            assert_eq!(refused(&format!(r#"{{"n": {below}}}"#), 1..=u32::MAX), told("1 or more", below, code));
        }
        let above = told("between 1 and 4294967295", "1e+30", "integer_above_max_value");
        assert_eq!(refused(r#"{"n": 1e+30}"#, 1..=u32::MAX), above);
        let error = fields(r#"{"t": 2.5}"#).number("t", 0.0..=2.0_f32).unwrap_err();
        assert_eq!(error.to_string(), "`t` must be between 0 and 2, got 2.5");
        assert!(matches!(error, FieldError::OutOfRange { code: "decimal_above_max_value", .. }), "{error:?}");
        assert_eq!(fields(r#"{"t": null}"#).number("t", 0.0..=2.0_f32), Ok(None));
        let fraction = fields(r#"{"n": 1.5}"#).number("n", 1..=8_u32).unwrap_err();
        assert!(matches!(fraction, FieldError::WrongType { .. }), "{fraction:?}");
    }

    #[test]
    fn a_body_that_is_not_an_object_says_why() {
        for (body, reason) in [
            (&b"{\"a\": \xff}"[..], "not UTF-8 at byte 6"),
            (b"[1]", "invalid type: sequence"),
            (b"{\"a\": 1", "EOF while parsing"),
            (b"", "EOF while parsing"),
        ] {
            let error = Fields::parse(Bytes::from_static(body)).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
