//! The fields that ask for structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and its older
//! `guided_*`. At most one language is asked for; which grammar that makes of an answer is `answer_grammar`'s.

use serde::Deserialize;
use serde_json::Value;
use stoker_engine::{
    constraint::Constraint,
    grammar::{GrammarSpec, lark_from_ebnf},
};

use crate::{
    answer::{AnswerGrammar, Part},
    grammars::NoGrammar,
    http::{error::ApiError, fields::Fields},
    replica::{Replica, Served},
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResponseFormat {
    r#type: String,
    json_schema: Option<NamedSchema>,
    #[serde(rename = "schema")]
    bare_schema: Option<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NamedSchema {
    #[serde(rename = "name")]
    _name: Option<String>,
    #[serde(rename = "description")]
    _description: Option<String>,
    schema: Option<Value>,
    /// The schema always holds.
    #[serde(rename = "strict")]
    _strict: Option<bool>,
}

/// vLLM's form. What loosens or pads a language is taken at its neutral value only.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Outputs {
    json: Option<Value>,
    json_object: Option<bool>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
    structural_tag: Option<Value>,
    disable_any_whitespace: Option<bool>,
    disable_additional_properties: Option<bool>,
    disable_fallback: Option<bool>,
    whitespace_pattern: Option<String>,
}

/// Takes the fields about structured output: the language that was asked for, and the field that did.
pub(crate) fn take(fields: &mut Fields) -> Result<Option<Part>, ApiError> {
    let mut asked: Vec<Part> = Vec::new();
    asked.extend(response_format(fields)?);
    if let Some(outputs) = fields.object::<Outputs>("structured_outputs")? {
        asked.extend(outputs.parts("structured_outputs.")?);
    }
    let guided = Outputs {
        json: fields.take("guided_json")?,
        regex: fields.take("guided_regex")?,
        choice: fields.take("guided_choice")?,
        grammar: fields.take("guided_grammar")?,
        whitespace_pattern: fields.take("guided_whitespace_pattern")?,
        ..Outputs::default()
    };
    asked.extend(guided.parts("guided_")?);
    match asked.len() {
        0 | 1 => Ok(asked.pop()),
        _ => {
            let (first, second) = (&asked[0].param, &asked[1].param);
            let message = format!("`{first}` and `{second}` both say what the answer is made of: send one of them");
            Err(ApiError::invalid(second, message))
        }
    }
}

/// A grammar, ready for requests, or a refusal that names the field at fault.
pub(crate) async fn compile(
    replica: &Replica,
    served: &Served,
    grammar: AnswerGrammar,
) -> Result<Constraint, ApiError> {
    let AnswerGrammar { spec, parts } = grammar;
    match served.grammars.compile(&served.engine, spec).await {
        Ok(ready) => {
            replica.metrics().grammar(ready.source, ready.took);
            Ok(ready.constraint)
        }
        Err(error) => {
            replica.metrics().grammar_refused();
            Err(refusal(served, parts, error).await)
        }
    }
}

/// Which of the parts it was: the first that does not compile alone, else all of them together.
async fn refusal(served: &Served, parts: Vec<Part>, error: NoGrammar) -> ApiError {
    let whole = parts.first().map(|part| part.param.clone()).unwrap_or_default();
    for Part { spec, param } in parts {
        if let Err(error) = served.grammars.compile(&served.engine, spec).await {
            return ApiError::invalid(&param, format!("`{param}` cannot be followed: {error}"));
        }
    }
    ApiError::invalid(&whole, format!("`{whole}` cannot be followed: {error}"))
}

fn response_format(fields: &mut Fields) -> Result<Option<Part>, ApiError> {
    let Some(format) = fields.object::<ResponseFormat>("response_format")? else { return Ok(None) };
    let part = |spec, param: &str| Ok(Some(Part { spec, param: param.to_owned() }));
    match (format.r#type.as_str(), format.json_schema, format.bare_schema) {
        ("text", None, None) => Ok(None),
        ("json_object", None, None) => part(GrammarSpec::json_object(), "response_format"),
        ("json_object", None, Some(schema)) => part(GrammarSpec::Json(schema), "response_format.schema"),
        ("json_schema", Some(NamedSchema { schema: Some(schema), .. }), None) => {
            part(schema_of(schema, "response_format.json_schema.schema")?, "response_format.json_schema.schema")
        }
        ("json_schema", ..) => {
            let param = "response_format.json_schema.schema";
            Err(ApiError::invalid(param, format!("`{param}` is missing: send the schema of the answer")))
        }
        ("text" | "json_object", ..) => {
            let param = "response_format.json_schema";
            Err(ApiError::invalid(param, format!("`{param}` needs `type: json_schema`, got `{}`", format.r#type)))
        }
        (other, ..) => {
            let message =
                format!("response_format `{other}` is not supported: use `text`, `json_object` or `json_schema`");
            Err(ApiError::unsupported("response_format.type", message))
        }
    }
}

impl Outputs {
    fn parts(self, prefix: &str) -> Result<Vec<Part>, ApiError> {
        let loosened = [
            ("structural_tag", self.structural_tag.is_some()),
            ("disable_any_whitespace", self.disable_any_whitespace == Some(true)),
            ("disable_additional_properties", self.disable_additional_properties == Some(true)),
            ("whitespace_pattern", self.whitespace_pattern.is_some()),
        ];
        if let Some((name, _)) = loosened.into_iter().find(|(_, is_sent)| *is_sent) {
            let param = format!("{prefix}{name}");
            return Err(ApiError::unsupported(&param, format!("`{param}` is not supported: remove it")));
        }
        // There is one back end, so nothing falls back.
        let _ = self.disable_fallback;
        let json = self.json.map(|schema| schema_of(schema, &format!("{prefix}json"))).transpose()?;
        let asked = [
            ("json", json),
            ("json_object", self.json_object.filter(|asked| *asked).map(|_| GrammarSpec::json_object())),
            ("regex", self.regex.map(GrammarSpec::Regex)),
            ("choice", self.choice.map(GrammarSpec::Choice)),
            ("grammar", self.grammar.map(|grammar| GrammarSpec::Lark(lark_from_ebnf(&grammar)))),
        ];
        let named = |(name, spec): (&str, Option<GrammarSpec>)| {
            spec.map(|spec| Part { spec, param: format!("{prefix}{name}") })
        };
        Ok(asked.into_iter().filter_map(named).collect())
    }
}

/// A schema, as JSON or as text that holds JSON.
fn schema_of(schema: Value, param: &str) -> Result<GrammarSpec, ApiError> {
    let schema = match schema {
        Value::String(text) => serde_json::from_str(&text)
            .map_err(|error| ApiError::invalid(param, format!("`{param}` is text that is not JSON: {error}")))?,
        schema => schema,
    };
    if schema.is_object() || schema.is_boolean() {
        return Ok(GrammarSpec::Json(schema));
    }
    Err(ApiError::invalid(param, format!("`{param}` must be a JSON schema, an object, got {schema}")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn take(body: Value) -> Result<Option<Part>, ApiError> {
        let mut fields = Fields::parse(body.to_string().into())?;
        let asked = super::take(&mut fields)?;
        fields.finish()?;
        Ok(asked)
    }

    #[test]
    fn every_way_to_ask_is_the_same_language() {
        let schema = json!({"type": "object", "properties": {"b": {}, "a": {}}});
        let asked = |body| take(body).unwrap().unwrap().spec;
        let json = GrammarSpec::Json(schema.clone());
        let named = json!({"name": "n", "strict": true, "schema": schema});
        assert_eq!(asked(json!({"response_format": {"type": "json_schema", "json_schema": named}})), json);
        assert_eq!(asked(json!({"structured_outputs": {"json": schema.to_string()}})), json);
        assert_eq!(asked(json!({"guided_json": schema})), json);
        assert_eq!(asked(json!({"guided_choice": ["a"]})), GrammarSpec::Choice(vec!["a".into()]));
        assert_eq!(asked(json!({"structured_outputs": {"regex": "a+"}})), GrammarSpec::Regex("a+".into()));
        assert_eq!(asked(json!({"response_format": {"type": "json_object"}})), GrammarSpec::json_object());
        assert_eq!(take(json!({"response_format": {"type": "text"}})).unwrap(), None);
        assert_eq!(take(json!({"structured_outputs": {"json": null, "json_object": false}})).unwrap(), None);
    }

    #[test]
    fn what_is_wrong_is_named_by_its_field() {
        for (body, param) in [
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema.schema"),
            (
                json!({"response_format": {"type": "text", "json_schema": {"schema": {}}}}),
                "response_format.json_schema",
            ),
            (json!({"guided_json": 5}), "guided_json"),
            (json!({"guided_json": "{"}), "guided_json"),
            (json!({"guided_regex": "a", "guided_choice": ["a"]}), "guided_choice"),
            (json!({"response_format": {"type": "json_object"}, "guided_regex": "a"}), "guided_regex"),
            (json!({"structured_outputs": {"structural_tag": {}}}), "structured_outputs.structural_tag"),
            (json!({"structured_outputs": {"jsn": {}}}), "structured_outputs.jsn"),
            (json!({"guided_whitespace_pattern": " "}), "guided_whitespace_pattern"),
        ] {
            let error = take(body.clone()).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{body}: {error:?}");
        }
    }
}
