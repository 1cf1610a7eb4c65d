//! Every field of every endpoint, by the schemas in `/openapi.json`: what no schema allows is refused by the field's name, what is
//! allowed is answered or refused by it, and a field that is not in an endpoint's schema is unknown to it.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::agent::*;

/// An endpoint that takes a body.
struct Endpoint {
    path: String,
    schema: Value,
}

impl Endpoint {
    /// All of them.
    async fn all(agent: &Agent) -> Vec<Self> {
        let (_, document) = agent.get("/openapi.json").await;
        let endpoint = |(path, operations): (&String, &Value)| {
            let name = operations["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].as_str()?;
            let schema = document.pointer(name.strip_prefix('#')?).expect("a schema that is named is there").clone();
            Some(Self { path: path.clone(), schema })
        };
        document["paths"].as_object().unwrap().iter().filter_map(endpoint).collect()
    }

    fn properties(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.schema["properties"].as_object().unwrap().iter()
    }

    /// What is sent beside `field`.
    fn base(&self, field: &str) -> Value {
        let message = json!([{"role": "user", "content": "x"}]);
        match (self.path.as_str(), field) {
            ("/tokenize", field) if field != "prompt" => json!({"messages": message}),
            ("/v1/score", "queries" | "documents") => json!({"queries": "x", "documents": "x"}),
            ("/v1/score", "items") => json!({"queries": "x", "items": "x"}),
            ("/v1/score", "data_1" | "data_2") => json!({"data_1": "x", "data_2": "x"}),
            ("/v1/chat/completions" | "/v1/messages" | "/v1/messages/count_tokens", _) => {
                let mut base = example(&self.schema);
                base["messages"] = message;
                base
            }
            _ => example(&self.schema),
        }
    }

    async fn answer(&self, agent: &Agent, field: &str, value: &Value) -> (u16, Value) {
        let mut body = self.base(field);
        body[field] = value.clone();
        let (status, answer) = agent.post(&self.path, body).await;
        (status.as_u16(), answer["error"].clone())
    }
}

/// The least that a schema allows.
fn example(schema: &Value) -> Value {
    if let Some(first) = schema["anyOf"].get(0) {
        return example(first);
    }
    if let Some(first) = schema["enum"].get(0) {
        return first.clone();
    }
    match schema["type"].as_str() {
        Some("boolean") => json!(false),
        Some("integer") => json!(schema["minimum"].as_i64().unwrap_or(0).max(1)),
        Some("number") => json!(schema["maximum"].as_f64().unwrap_or(1.0).min(1.0)),
        Some("string") => json!("x"),
        Some("array") => json!(vec![example(&schema["items"]); schema["minItems"].as_u64().unwrap_or(0) as usize]),
        Some("object") => {
            let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            required.map(|name| (name.to_owned(), example(&schema["properties"][name]))).collect()
        }
        _ => Value::Null,
    }
}

/// Whether a schema allows a value. Knows the words that are in the document, and no others.
fn fits(schema: &Value, value: &Value) -> bool {
    if let Some(schemas) = schema["anyOf"].as_array() {
        return schemas.iter().any(|schema| fits(schema, value));
    }
    if let Some(allowed) = schema["enum"].as_array() {
        return allowed
            .iter()
            .any(|allowed| allowed == value || allowed.as_f64().is_some_and(|n| value.as_f64() == Some(n)));
    }
    let is_within = |n: f64, least: &str, most: &str| {
        schema[least].as_f64().is_none_or(|least| n >= least) && schema[most].as_f64().is_none_or(|most| n <= most)
    };
    match (schema["type"].as_str(), value) {
        (None, _) | (Some("null"), Value::Null) | (Some("boolean"), Value::Bool(_)) => true,
        (Some("integer"), Value::Number(n)) if n.is_f64() => false,
        (Some("integer" | "number"), Value::Number(n)) => {
            let n = n.as_f64().unwrap();
            is_within(n, "minimum", "maximum") && schema["exclusiveMinimum"].as_f64().is_none_or(|least| n > least)
        }
        (Some("string"), Value::String(text)) => is_within(text.chars().count() as f64, "minLength", "maxLength"),
        (Some("array"), Value::Array(items)) => {
            is_within(items.len() as f64, "minItems", "maxItems")
                && items.iter().all(|item| fits(&schema["items"], item))
        }
        (Some("object"), Value::Object(members)) => {
            let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let member = |(name, value): (&String, &Value)| match schema["properties"].get(name) {
                // Everywhere `null` says nothing.
                Some(schema) => value.is_null() || fits(schema, value),
                None => schema["additionalProperties"] != false && fits(&schema["additionalProperties"], value),
            };
            required.into_iter().all(|name| members.contains_key(name)) && members.iter().all(member)
        }
        _ => false,
    }
}

/// Values of all kinds, and those around a schema's bounds.
fn values(schema: &Value) -> Vec<Value> {
    let mut values = vec![
        json!(true),
        json!(0),
        json!(-1),
        json!(1.5),
        json!(-1e30),
        json!(1e30),
        json!(u64::MAX),
        json!(""),
        json!("NaN"),
        json!("1"),
        json!([]),
        json!([1]),
        json!(["x", 1.5]),
        json!([[]]),
        json!({}),
        json!({"x": {"y": -1}}),
    ];
    let all = schema["anyOf"].as_array().map_or(std::slice::from_ref(schema), Vec::as_slice);
    for schema in all {
        let beyond = |name: &str, by: f64| schema[name].as_f64().map(|bound| bound + by);
        let numbers = [beyond("minimum", -1.0), beyond("maximum", 1.0), beyond("exclusiveMinimum", 0.0)];
        let number = |n: f64| if schema["type"] == "integer" { json!(n as i128 as i64) } else { json!(n) };
        values.extend(numbers.into_iter().flatten().filter(|n| n.abs() < 1e15).map(number));
        values.extend(schema["maxLength"].as_u64().map(|most| json!("x".repeat(most as usize + 1))));
        values
            .extend(schema["maxItems"].as_u64().map(|most| json!(vec![example(&schema["items"]); most as usize + 1])));
        if schema["type"] == "array" {
            values.extend(self::values(&schema["items"]).into_iter().map(|item| json!([item])));
        }
        for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
            values.extend(self::values(inner).into_iter().map(|value| {
                let mut members = example(schema);
                members[name] = value;
                members
            }));
        }
    }
    values
}

/// Whether an error is about a field, or something inside it.
fn is_about(error: &Value, field: &str) -> bool {
    let param = error["param"].as_str().unwrap_or_default();
    param.strip_prefix(field).is_some_and(|inside| inside.is_empty() || inside.starts_with(['.', '[']))
}

fn is_unknown(error: &Value) -> bool {
    error["message"].as_str().unwrap_or_default().starts_with("unknown or unsupported parameter")
}

#[tokio::test]
async fn every_field_is_refused_at_what_its_schema_does_not_allow_and_never_fails_at_what_it_does() {
    let agent = Agent::new();
    let (mut n_sent, mut wrong) = (0, BTreeSet::new());
    for endpoint in Endpoint::all(&agent).await {
        for (field, schema) in endpoint.properties() {
            for value in values(schema) {
                let (status, error) = endpoint.answer(&agent, field, &value).await;
                n_sent += 1;
                let is_right = match fits(schema, &value) {
                    // What this model or device does not do is refused by its name, too.
                    true => status == 200 || matches!(status, 400 | 404) && error["param"].is_string(),
                    false => {
                        status == 400 && is_about(&error, field) && !(is_unknown(&error) && error["param"] == **field)
                    }
                };
                let said = error["message"].as_str().unwrap_or_default().chars().count();
                if !is_right || said > 600 {
                    let value: String = value.to_string().chars().take(120).collect();
                    wrong.insert(format!("{} {field}: {value}: {status} {error}", endpoint.path));
                }
            }
        }
    }
    println!("{n_sent} requests");
    assert!(wrong.is_empty(), "{} of {n_sent}:\n{}", wrong.len(), wrong.into_iter().collect::<Vec<_>>().join("\n"));
}

#[tokio::test]
async fn a_field_that_is_not_in_an_endpoint_s_schema_is_unknown_to_it() {
    let agent = Agent::new();
    let endpoints = Endpoint::all(&agent).await;
    let all = endpoints.iter().flat_map(Endpoint::properties).map(|(name, _)| name.clone());
    let all: BTreeSet<String> = all.chain(["guided_xml", "best_off", "input_ids", "lora"].map(str::to_owned)).collect();
    for endpoint in &endpoints {
        let own: BTreeSet<String> = endpoint.properties().map(|(name, _)| name.clone()).collect();
        assert!(own.len() >= 2, "{}", endpoint.path);
        for field in all.difference(&own) {
            let (status, error) = endpoint.answer(&agent, field, &json!(true)).await;
            assert!(
                status == 400 && error["param"] == **field && is_unknown(&error),
                "{} {field}: {status} {error}",
                endpoint.path
            );
        }
    }
}

#[tokio::test]
async fn what_is_no_json_is_refused_whatever_its_field_would_be() {
    let agent = Agent::new();
    for number in ["NaN", "Infinity", "-Infinity", "1e400", "0x10", "01", "+1", ".5", "1_000", "'1'"] {
        for field in ["temperature", "n", "logit_bias"] {
            let body = format!(r#"{{"prompt": "x", "{field}": {number}}}"#);
            let (status, answer) = json_of(agent.send("POST", "/v1/completions", &body).await).await;
            let message = answer["error"]["message"].as_str().unwrap_or_default();
            assert!(
                status == 400 && (message.contains("JSON") || message.contains(field)),
                "{body}: {status} {answer}"
            );
        }
    }
}
