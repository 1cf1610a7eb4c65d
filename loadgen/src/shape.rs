//! What an answer has to be: any text, JSON of a schema, or a call of a tool; and whether one is. Pure.

use std::{collections::BTreeMap, fmt, sync::Arc};

use jsonschema::Validator;
use serde_json::{Map, Value, json};
use stoker_workload::Rng;
use thiserror::Error;

use crate::answer::{Complete, shortened};

const SCHEMAS: &str = include_str!("schemas.json");
const TOOLS: &str = include_str!("tools.json");
/// The end of an answer that `max_tokens` cut.
const FINISH_LENGTH: &str = "length";

/// What is asked for. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub enum Shape {
    /// As the model likes.
    #[default]
    Text,
    /// By `response_format`, strict.
    Json(Arc<Schema>),
    /// By `tools`.
    Call(Arc<Tools>),
}

/// The three of [`Shape`], as they are counted.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Kind {
    /// See [`Shape::Text`].
    Text,
    /// See [`Shape::Json`].
    Schema,
    /// See [`Shape::Call`].
    Tools,
}

/// A schema and what judges by it.
#[derive(Debug)]
pub struct Schema {
    document: Value,
    validator: Validator,
}

/// Tools to choose from, and whether one must be called.
#[derive(Debug)]
pub struct Tools {
    definitions: Vec<Value>,
    choice: ToolChoice,
    parameters: BTreeMap<String, Validator>,
}

/// Whether an answer has to be a call.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub enum ToolChoice {
    /// The model decides; an answer without a call is counted as such.
    Auto,
    /// It has to be one.
    Required,
}

/// What a complete answer turned out to be.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// What was asked for.
    Valid,
    /// It ended at `max_tokens`, so nobody knows.
    Short,
    /// Text where a tool could have been called, and did not have to be.
    NoCall,
    /// Something else, and why.
    Invalid(String),
}

/// Schemas or tools that cannot be used.
#[derive(Debug, Error, PartialEq)]
pub enum ShapeError {
    /// Not a schema.
    #[error("{of} is no JSON Schema: {reason}")]
    Schema {
        /// Of what.
        of: String,
        /// Why not.
        reason: String,
    },
    /// Not a list of tools.
    #[error(
        "write tools as a list of {{\"type\": \"function\", \"function\": {{\"name\": …, \"parameters\": {{…}}}}}}: {0}"
    )]
    Tools(String),
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Schema => "schema",
            Self::Tools => "tools",
        })
    }
}

impl Schema {
    /// Reads one; `of` says in errors which.
    pub fn new(of: &str, document: Value) -> Result<Self, ShapeError> {
        let validator = validator(of, &document)?;
        Ok(Self { document, validator })
    }

    /// Those that are here: a few fields each, bounded, as of forms that people fill in.
    pub fn built_in() -> Vec<Arc<Self>> {
        let documents: Vec<Value> = serde_json::from_str(SCHEMAS).expect("our own file");
        let read = |document: Value| Self::new("a built-in schema", document).expect("our own file");
        documents.into_iter().map(|document| Arc::new(read(document))).collect()
    }
}

impl Tools {
    /// Reads a list of tools as requests have it.
    pub fn new(definitions: Value, choice: ToolChoice) -> Result<Self, ShapeError> {
        let Value::Array(definitions) = definitions else { return Err(ShapeError::Tools("it is no list".into())) };
        if definitions.is_empty() {
            return Err(ShapeError::Tools("the list is empty".into()));
        }
        let parameters = definitions.iter().enumerate().map(|(idx, tool)| parameters(idx, tool));
        Ok(Self { parameters: parameters.collect::<Result<_, _>>()?, definitions, choice })
    }

    /// Those that are here.
    pub fn built_in(choice: ToolChoice) -> Arc<Self> {
        let definitions = serde_json::from_str(TOOLS).expect("our own file");
        Arc::new(Self::new(definitions, choice).expect("our own file"))
    }
}

impl Shape {
    /// How it is counted.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Text => Kind::Text,
            Self::Json(_) => Kind::Schema,
            Self::Call(_) => Kind::Tools,
        }
    }

    /// The fields of a chat request that ask for it.
    pub(crate) fn fields(&self) -> Map<String, Value> {
        let fields = match self {
            Self::Text => json!({}),
            Self::Json(schema) => json!({"response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "strict": true, "schema": schema.document},
            }}),
            Self::Call(tools) => {
                let choice = if tools.choice == ToolChoice::Required { "required" } else { "auto" };
                json!({"tools": tools.definitions, "tool_choice": choice})
            }
        };
        let Value::Object(fields) = fields else { unreachable!("written as an object just above") };
        fields
    }

    /// Whether an answer is one; `None` where any is.
    pub(crate) fn judge(&self, answer: &Complete) -> Option<Verdict> {
        let judged = match self {
            Self::Text => return None,
            Self::Json(schema) => judged(&answer.text, &schema.validator),
            Self::Call(tools) if answer.calls.is_empty() && tools.choice == ToolChoice::Auto => {
                return Some(Verdict::NoCall);
            }
            Self::Call(tools) => tools.judge(answer),
        };
        Some(match judged {
            Ok(()) => Verdict::Valid,
            Err(_) if answer.finish_reason.as_deref() == Some(FINISH_LENGTH) => Verdict::Short,
            Err(reason) => Verdict::Invalid(shortened(&reason)),
        })
    }
}

impl Tools {
    fn judge(&self, answer: &Complete) -> Result<(), String> {
        if answer.calls.is_empty() {
            return Err(format!("no tool was called, but: {}", answer.text));
        }
        for call in &answer.calls {
            let parameters = self.parameters.get(&call.name);
            let parameters = parameters.ok_or_else(|| format!("{:?} is none of the tools", call.name))?;
            judged(&call.arguments, parameters).map_err(|reason| format!("{}: {reason}", call.name))?;
        }
        Ok(())
    }
}

/// Which part of requests asks for what, and by which schemas and tools.
#[derive(Clone, Debug)]
pub struct Shapes {
    /// From 0 to 1.
    pub schema_share: f64,
    /// One is drawn for each of those.
    pub schemas: Vec<Arc<Schema>>,
    /// From 0 to 1; together with the other share at most 1.
    pub tools_share: f64,
    /// All of them are in each of those.
    pub tools: Arc<Tools>,
}

impl Shapes {
    /// Draws one.
    pub fn draw(&self, rng: &mut Rng) -> Shape {
        let at = rng.uniform();
        if at < self.schema_share {
            let idx = (rng.uniform() * self.schemas.len() as f64) as usize;
            return Shape::Json(Arc::clone(&self.schemas[idx]));
        }
        if at < self.schema_share + self.tools_share {
            return Shape::Call(Arc::clone(&self.tools));
        }
        Shape::Text
    }
}

fn judged(text: &str, validator: &Validator) -> Result<(), String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("{error} in {text}"))?;
    validator.validate(&value).map_err(|error| format!("{error} at {:?}", error.instance_path.to_string()))
}

fn validator(of: &str, document: &Value) -> Result<Validator, ShapeError> {
    jsonschema::validator_for(document)
        .map_err(|error| ShapeError::Schema { of: of.to_owned(), reason: shortened(&error.to_string()) })
}

/// A tool without `parameters` takes any.
fn parameters(idx: usize, tool: &Value) -> Result<(String, Validator), ShapeError> {
    let name = tool["function"]["name"].as_str().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| ShapeError::Tools(format!("the one at {idx} has no function.name")))?;
    let document = tool["function"].get("parameters").cloned().unwrap_or(json!({}));
    Ok((name.to_owned(), validator(&format!("parameters of {name}"), &document)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::answer::Call;

    fn answer(text: &str, calls: &[(&str, &str)], finish: &str) -> Complete {
        let call = |(idx, (name, arguments)): (usize, &(&str, &str))| Call {
            id: format!("call-{idx}"),
            name: (*name).to_owned(),
            arguments: (*arguments).to_owned(),
        };
        Complete {
            pieces: Vec::new(),
            usage: None,
            text: text.to_owned(),
            calls: calls.iter().enumerate().map(call).collect(),
            finish_reason: Some(finish.to_owned()),
        }
    }

    fn reason(verdict: Option<Verdict>) -> String {
        let Some(Verdict::Invalid(reason)) = verdict else { panic!("{verdict:?}") };
        reason
    }

    #[test]
    fn json_is_judged_by_its_schema_and_what_was_cut_is_not_judged() {
        let shape = Shape::Json(Arc::clone(&Schema::built_in()[0]));
        let judge = |text: &str, finish| shape.judge(&answer(text, &[], finish));
        let good = r#"{"category": "billing", "urgent": true, "stars": 3}"#;
        assert_eq!(judge(good, "stop"), Some(Verdict::Valid));
        assert_eq!(judge(good, "length"), Some(Verdict::Valid), "it is whole, whatever ended it");
        assert_eq!(judge("{\"category\": ", "length"), Some(Verdict::Short));
        assert!(reason(judge("{\"category\": ", "stop")).contains("EOF"));
        assert!(reason(judge(&good.replace('3', "6"), "stop")).contains("/stars"));
        assert!(reason(judge(&good.replace(r#", "stars": 3"#, ""), "stop")).contains("stars"));
    }

    #[test]
    fn a_call_names_a_tool_and_its_arguments_fit() {
        let light = |arguments| ("set_light", arguments);
        let judge = |calls: &[(&str, &str)], choice| {
            Shape::Call(Tools::built_in(choice)).judge(&answer("so", calls, "tool_calls"))
        };
        let good = light(r#"{"room": "hall", "on": false}"#);
        for choice in [ToolChoice::Auto, ToolChoice::Required] {
            assert_eq!(judge(&[good, good], choice), Some(Verdict::Valid));
            assert!(reason(judge(&[good, light("{}")], choice)).contains("set_light"));
            assert!(reason(judge(&[("fly", "{}")], choice)).contains("\"fly\" is none of the tools"));
        }
        assert_eq!(judge(&[], ToolChoice::Auto), Some(Verdict::NoCall));
        assert!(reason(judge(&[], ToolChoice::Required)).contains("no tool was called, but: so"));
    }

    #[test]
    fn shares_are_those_of_the_draws() {
        let tools = Tools::built_in(ToolChoice::Required);
        let shapes = Shapes { schema_share: 0.2, schemas: Schema::built_in(), tools_share: 0.3, tools };
        let mut rng = Rng::seeded(1);
        let kinds: Vec<Kind> = (0..10_000).map(|_| shapes.draw(&mut rng).kind()).collect();
        let share = |kind| kinds.iter().filter(|one| **one == kind).count() as f64 / 1e4;
        // Four standard deviations of ten thousand draws are 0.02 at most.
        for (kind, wanted) in [(Kind::Schema, 0.2), (Kind::Tools, 0.3), (Kind::Text, 0.5)] {
            assert!((share(kind) - wanted).abs() < 0.02, "{kind}: {}", share(kind));
        }
    }

    #[test]
    fn what_is_no_schema_or_tool_says_which_and_why() {
        let error = Schema::new("mine.json", json!({"type": "text"})).unwrap_err().to_string();
        assert!(error.starts_with("mine.json is no JSON Schema: ") && error.contains("text"), "{error}");
        for (tools, words) in [
            (json!({}), "it is no list"),
            (json!([]), "the list is empty"),
            (json!([{"type": "function"}]), "the one at 0 has no function.name"),
            (json!([{"function": {"name": "f", "parameters": 3}}]), "parameters of f is no JSON Schema"),
        ] {
            let error = Tools::new(tools, ToolChoice::Auto).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
