//! Reading a JSON object field by field, with errors that name file and field.

use std::{ops::Range, sync::OnceLock};

use serde_json::{Map, Value};

use super::ModelError;
use super::TokenId;

/// Sizes that are believed: no product of two of them overflows, and no model is near the largest.
const SIZES: Range<u64> = 1..1 << 31;

/// A JSON object whose errors name file and field.
pub struct Fields<'a> {
    fields: &'a Map<String, Value>,
    file: &'a str,
}

impl<'a> Fields<'a> {
    /// The fields of `value`; `file` is its name in messages.
    pub fn of(value: &'a Value, file: &'a str) -> Result<Self, ModelError> {
        let Value::Object(fields) = value else {
            return Err(ModelError::Json { file: file.into(), reason: "it is not an object".into() });
        };
        Ok(Self { fields, file })
    }

    /// Its name in messages.
    pub fn file(&self) -> &'a str {
        self.file
    }

    /// The object in a field; one without fields where there is none.
    pub fn object(&self, field: &str) -> Result<Fields<'a>, ModelError> {
        match self.get(field) {
            Some(Value::Object(fields)) => Ok(Fields { fields, file: self.file }),
            Some(value) => Err(self.wrong(field, value, "an object")),
            None => Ok(Fields { fields: empty(), file: self.file }),
        }
    }

    /// The refusal of a field.
    pub fn error(&self, field: &str, problem: String) -> ModelError {
        ModelError::Field { file: self.file.into(), field: field.into(), problem }
    }

    /// The value of a field that is there and not null.
    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    /// A default that holds where a field is not there at all: one that is null says that there is nothing.
    pub fn if_absent<T>(&self, field: &str, default: Option<T>) -> Option<T> {
        default.filter(|_| !self.fields.contains_key(field))
    }

    /// The refusal of a value, with what would be right.
    pub fn wrong(&self, field: &str, value: &Value, expected: &str) -> ModelError {
        self.error(field, format!("is {value}, expected {expected}"))
    }

    /// A whole number from 1 on that has to be there.
    pub fn size(&self, field: &str) -> Result<usize, ModelError> {
        self.optional_size(field)?.ok_or_else(|| self.error(field, "is missing".into()))
    }

    /// A whole number from 1 on, if the field is there.
    pub fn optional_size(&self, field: &str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let size = value.as_u64().filter(|size| SIZES.contains(size));
        match size {
            Some(size) => Ok(Some(size as usize)),
            None => Err(self.wrong(field, value, "a whole number from 1 on")),
        }
    }

    /// A number, if the field is there.
    pub fn number(&self, field: &str) -> Result<Option<f32>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_f64().filter(|number| number.is_finite()) {
            Some(number) => Ok(Some(number as f32)),
            None => Err(self.wrong(field, value, "a number")),
        }
    }

    /// A number above 0, if the field is there.
    pub fn positive(&self, field: &str) -> Result<Option<f32>, ModelError> {
        match self.number(field)? {
            Some(number) if number <= 0.0 => Err(self.error(field, format!("is {number}, expected more than 0"))),
            number => Ok(number),
        }
    }

    /// A number above 0 that has to be there.
    pub fn needed(&self, field: &str) -> Result<f32, ModelError> {
        self.positive(field)?.ok_or_else(|| self.error(field, "is missing".into()))
    }

    /// True or false, or what holds where the field is not there.
    pub fn flag(&self, field: &str, default: bool) -> Result<bool, ModelError> {
        match self.get(field) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => Err(self.wrong(field, value, "true or false")),
        }
    }

    /// A text, if the field is there.
    pub fn text(&self, field: &str) -> Result<Option<&'a str>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(field, value, "a text"))
    }

    /// A list of texts, if the field is there.
    pub fn texts(&self, field: &str) -> Result<Option<Vec<&'a str>>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let texts = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        texts.map(Some).ok_or_else(|| self.wrong(field, value, "a list of texts"))
    }

    /// A list of sizes, if the field is there.
    pub fn sizes(&self, field: &str) -> Result<Option<Vec<usize>>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let size = |value: &Value| value.as_u64().filter(|size| SIZES.contains(size)).map(|size| size as usize);
        let sizes = value.as_array().and_then(|list| list.iter().map(size).collect());
        sizes.map(Some).ok_or_else(|| self.wrong(field, value, "a list of whole numbers from 1 on"))
    }

    /// How many inputs share a scale; `None`: all, which is written as -1.
    pub fn group_size(&self) -> Result<Option<usize>, ModelError> {
        let field = if self.get("group_size").is_some() { "group_size" } else { "q_group_size" };
        match self.get(field).and_then(Value::as_i64) {
            Some(-1) => Ok(None),
            _ => self.optional_size(field),
        }
    }

    /// The refusal of a field that is there.
    pub fn wrong_text(&self, field: &str, expected: &str) -> ModelError {
        self.wrong(field, self.get(field).unwrap_or(&Value::Null), expected)
    }

    /// A list of numbers above 0, if the field is there.
    pub fn numbers(&self, field: &str) -> Result<Option<Vec<f32>>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let number = |value: &Value| value.as_f64().filter(|number| *number > 0.0 && number.is_finite());
        let numbers = value.as_array().and_then(|list| list.iter().map(|v| Some(number(v)? as f32)).collect());
        numbers.map(Some).ok_or_else(|| self.error(field, "is not a list of numbers above 0".into()))
    }

    /// A list with one entry a layer, if the field is there.
    pub fn layers(&self, field: &str, n_layers: usize) -> Result<Option<&'a [Value]>, ModelError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        match value.as_array() {
            Some(list) if list.len() == n_layers => Ok(Some(list)),
            _ => Err(self.error(field, format!("is not a list with one entry for each of the {n_layers} layers"))),
        }
    }

    /// One token or a list of them.
    pub fn tokens(&self, field: &str) -> Result<Vec<TokenId>, ModelError> {
        let token = |value: &Value| value.as_u64().and_then(|token| TokenId::try_from(token).ok());
        let tokens = match self.get(field) {
            None => Some(Vec::new()),
            Some(Value::Array(list)) => list.iter().map(token).collect(),
            Some(value) => token(value).map(|token| vec![token]),
        };
        tokens.ok_or_else(|| self.wrong(field, &self.fields[field], "a token id or a list of them"))
    }
}

fn empty() -> &'static Map<String, Value> {
    static EMPTY: OnceLock<Map<String, Value>> = OnceLock::new();
    EMPTY.get_or_init(Map::new)
}
