//! The fields of one JSON request body, taken one by one, so that every mistake names its field and nothing that was
//! sent is ignored: `finish` refuses what nobody took. Knows no endpoint.

use std::{collections::BTreeMap, ops::RangeInclusive};

use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

/// Longest reason in an error message: serde repeats a wrong string whole, however long it is.
const REASON_CHARS: usize = 200;

/// The fields nobody has taken yet.
#[derive(Debug)]
pub(crate) struct Fields {
    left: BTreeMap<String, Box<RawValue>>,
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
    /// A value of another type.
    #[error("`{path}` is wrong: {reason}")]
    WrongType {
        /// Path of the value, e.g. `messages[1].role`.
        path: String,
        /// What was found and expected.
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
    },
    /// Fields this endpoint does not have.
    #[error("unknown or unsupported parameter `{field}`: remove it (this server never ignores a parameter)")]
    Unknown {
        /// The first of them.
        field: String,
    },
}

impl FieldError {
    /// The field at fault.
    pub(crate) fn param(&self) -> Option<&str> {
        match self {
            Self::Malformed { .. } => None,
            Self::WrongType { path, .. } => Some(path),
            Self::Missing { field } | Self::OutOfRange { field, .. } | Self::Unknown { field } => Some(field),
        }
    }
}

impl Fields {
    /// The fields of a body that must be one JSON object.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, FieldError> {
        let malformed = |reason: String| FieldError::Malformed { reason };
        let text = std::str::from_utf8(body)
            .map_err(|error| malformed(format!("not UTF-8 at byte {}", error.valid_up_to())))?;
        let left = serde_json::from_str(text).map_err(|error| malformed(error.to_string()))?;
        Ok(Self { left })
    }

    /// Takes a field; absent and `null` are the same.
    pub(crate) fn take<T: DeserializeOwned>(&mut self, field: &str) -> Result<Option<T>, FieldError> {
        let Some(raw) = self.left.remove(field) else { return Ok(None) };
        if raw.get() == "null" {
            return Ok(None);
        }
        let mut json = serde_json::Deserializer::from_str(raw.get());
        let value = serde_path_to_error::deserialize(&mut json).map_err(|error| wrong_type(field, &error))?;
        // A 128-bit integer is read off the front of `1.5`: what is left over says that it was none.
        match json.end() {
            Ok(()) => Ok(Some(value)),
            Err(_) => Err(FieldError::WrongType { path: field.to_owned(), reason: "expected an integer".to_owned() }),
        }
    }

    /// Takes a field that must be there.
    pub(crate) fn require<T: DeserializeOwned>(&mut self, field: &str) -> Result<T, FieldError> {
        self.take(field)?.ok_or_else(|| FieldError::Missing { field: field.to_owned() })
    }

    /// Takes a value that must satisfy `accepts`, described as `expected`.
    pub(crate) fn checked<T>(
        &mut self,
        field: &str,
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
            }),
            value => Ok(value),
        }
    }

    /// Takes a number and checks its range.
    pub(crate) fn number<T>(&mut self, field: &str, range: RangeInclusive<T>) -> Result<Option<T>, FieldError>
    where
        T: DeserializeOwned + PartialOrd + std::fmt::Display,
    {
        let expected = format!("between {} and {}", range.start(), range.end());
        self.checked(field, &expected, |value| range.contains(value))
    }

    /// Refuses what nobody took.
    pub(crate) fn finish(self) -> Result<(), FieldError> {
        match self.left.into_iter().find(|(_, raw)| raw.get() != "null") {
            Some((field, _)) => Err(FieldError::Unknown { field }),
            None => Ok(()),
        }
    }
}

fn wrong_type(field: &str, error: &serde_path_to_error::Error<serde_json::Error>) -> FieldError {
    let inner = error.path().to_string();
    let path = match inner.as_str() {
        "." => field.to_owned(),
        _ if inner.starts_with('[') => format!("{field}{inner}"),
        _ => format!("{field}.{inner}"),
    };
    // serde_json ends its messages with a position inside the field's own text, which would mislead.
    let message = error.inner().to_string();
    let reason = excerpt(message.rsplit_once(" at line ").map_or(message.as_str(), |(reason, _)| reason));
    FieldError::WrongType { path, reason }
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
        Fields::parse(json.as_bytes()).unwrap()
    }

    #[test]
    fn what_nobody_takes_is_refused_by_name_unless_null() {
        let mut body = fields(r#"{"a": 1, "guided_json": {}, "b": null}"#);
        assert_eq!(body.take::<u32>("a"), Ok(Some(1)));
        assert_eq!(body.finish().unwrap_err().param(), Some("guided_json"));
        assert_eq!(fields(r#"{"b": null}"#).finish(), Ok(()));
    }

    #[test]
    fn a_wrong_type_names_the_path_and_shows_the_value() {
        let error = fields(r#"{"t": "hot"}"#).take::<f32>("t").unwrap_err();
        assert_eq!(error.to_string(), r#"`t` is wrong: invalid type: string "hot", expected f32"#);
        let error = fields(r#"{"m": [[1], [2, "x"]]}"#).take::<Vec<Vec<u32>>>("m").unwrap_err();
        assert_eq!(error.param(), Some("m[1][1]"));
    }

    #[test]
    fn a_number_out_of_range_says_the_range() {
        let error = fields(r#"{"t": 2.5}"#).number("t", 0.0..=2.0).unwrap_err();
        assert_eq!(error.to_string(), "`t` must be between 0 and 2, got 2.5");
        assert_eq!(fields(r#"{"t": null}"#).number("t", 0.0..=2.0), Ok(None));
    }

    #[test]
    fn a_body_that_is_not_an_object_says_why() {
        for (body, reason) in [
            (&b"{\"a\": \xff}"[..], "not UTF-8 at byte 6"),
            (b"[1]", "invalid type: sequence"),
            (b"{\"a\": 1", "EOF while parsing"),
            (b"", "EOF while parsing"),
        ] {
            let error = Fields::parse(body).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
