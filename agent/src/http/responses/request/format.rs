//! The form that an answer's text is to have: the `response_format` of the chat request.

use serde::Deserialize;
use serde_json::{Value, value::RawValue};

use super::Echoed;
use crate::http::{
    error::ApiError,
    fields::{FieldError, Fields},
    json_text::{Object, text_json},
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    format: Option<Box<RawValue>>,
    verbosity: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Format {
    r#type: String,
    name: Option<Value>,
    description: Option<Value>,
    schema: Option<Box<RawValue>>,
    strict: Option<Value>,
}

/// Takes it out of `fields`.
pub(super) fn add_text(chat: &mut Object, echoed: &mut Echoed, fields: &mut Fields) -> Result<(), ApiError> {
    let mut shown = serde_json::json!({"format": {"type": "text"}});
    if let Some(Text { format, verbosity }) = fields.object("text")? {
        if let Some(verbosity) = verbosity {
            chat.add("verbosity", &text_json(&verbosity));
        }
        if let Some(raw) = format {
            chat.add("response_format", &response_format(&raw)?);
            shown["format"] = shown_format(&raw);
        }
    }
    echoed.push(("text", shown));
    Ok(())
}

/// A schema holds whether or not `strict` says so.
fn shown_format(raw: &RawValue) -> Value {
    let mut format: Value = serde_json::from_str(raw.get()).unwrap_or_default();
    if format["type"] == "json_schema" {
        format["strict"] = true.into();
        if let Some(members) = format.as_object_mut() {
            members.entry("name").or_insert_with(|| "output".into());
            members.entry("description").or_insert(Value::Null);
        }
    }
    format
}

/// The schema is a member of its own in chat requests.
fn response_format(raw: &RawValue) -> Result<String, ApiError> {
    let Format { r#type, name, description, schema, strict } = serde_json::from_str(raw.get())
        .map_err(|error| ApiError::invalid("text.format", format!("`text.format` is wrong: {error}")))?;
    let of_schemas = [
        ("name", name.is_some()),
        ("description", description.is_some()),
        ("schema", schema.is_some()),
        ("strict", strict.is_some()),
    ];
    if let Some((member, _)) = of_schemas.into_iter().find(|(_, is_sent)| *is_sent && r#type != "json_schema") {
        let field = format!("text.format.{member}");
        return Err(FieldError::Unknown { field, advice: "it is for `type: json_schema`".into() }.into());
    }
    let mut format = Object::default();
    format.add("type", &text_json(&r#type));
    if r#type == "json_schema" {
        let mut json_schema = Object::default();
        for (member, value) in [("name", name), ("description", description), ("strict", strict)] {
            if let Some(value) = value.filter(|value| !value.is_null()) {
                json_schema.add(member, &value.to_string());
            }
        }
        let schema = schema.ok_or(FieldError::Missing { field: "text.format.schema".into() })?;
        json_schema.add("schema", schema.get());
        format.add("json_schema", &json_schema.text());
    }
    Ok(format.text())
}
