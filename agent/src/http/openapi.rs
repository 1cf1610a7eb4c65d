//! `GET /openapi.json`: the endpoints, their methods and the fields of requests, for tools that read such a document. What every field
//! means is in `docs/api.md`; bodies are checked by the endpoints, not by this.

mod requests;

use axum::Json;
use serde_json::{Value, json};

/// The document.
pub(crate) async fn document() -> Json<Value> {
    Json(json!({
        "openapi": "3.1.0",
        "info": {"title": "Stoker agent", "version": env!("CARGO_PKG_VERSION")},
        "paths": paths(),
        "components": {"schemas": schemas()},
    }))
}

fn paths() -> Value {
    json!({
        "/v1/chat/completions": {"post": generates("ChatRequest", "ChatCompletion")},
        "/v1/completions": {"post": generates("CompletionRequest", "Completion")},
        "/v1/responses": {"post": generates("ResponseRequest", "Response")},
        "/v1/responses/{id}": {
            "get": of_response("A response that is kept"), "delete": of_response("The response is forgotten")},
        "/v1/messages": {"post": generates("MessageRequest", "Message")},
        "/v1/messages/count_tokens": {"post": posts("MessagesToCount", "TokenCount")},
        "/v1/embeddings": {"post": posts("EmbeddingRequest", "Embeddings")},
        "/v1/score": {"post": posts("ScoreRequest", "Scores")},
        "/v1/rerank": {"post": posts("RerankRequest", "Ranking")},
        "/v1/models": {"get": gets("The names that are served", "ModelList")},
        "/tokenize": {"post": posts("TokenizeRequest", "Tokens")},
        "/detokenize": {"post": posts("DetokenizeRequest", "Text")},
        "/version": {"get": gets("This release", "Version")},
        "/health": {"get": gets("The replica takes requests", "Object")},
        "/readyz": {"get": gets("The replica takes requests", "Object")},
        "/healthz": {"get": gets("The process makes progress", "Object")},
    })
}

fn schema(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn of_json(description: &str, name: &str) -> Value {
    json!({"description": description, "content": {"application/json": {"schema": schema(name)}}})
}

fn gets(description: &str, answer: &str) -> Value {
    json!({"responses": {"200": of_json(description, answer), "default": of_json("An error", "Object")}})
}

fn of_response(description: &str) -> Value {
    let mut operation = gets(description, "Object");
    operation["parameters"] =
        json!([{"name": "id", "in": "path", "required": true, "schema": {"type": "string", "minLength": 1}}]);
    operation
}

fn posts(body: &str, answer: &str) -> Value {
    let mut operation = gets("The answer", answer);
    operation["requestBody"] = json!({"required": true, "content": {"application/json": {"schema": schema(body)}}});
    operation
}

/// A stream if the body says `"stream": true`.
fn generates(body: &str, answer: &str) -> Value {
    let mut operation = posts(body, answer);
    operation["responses"]["200"]["content"]["text/event-stream"] = json!({"schema": {"type": "string"}});
    operation
}

fn object(required: &[&str], properties: Value) -> Value {
    json!({"type": "object", "required": required, "properties": properties})
}

/// Of requests and of answers.
fn schemas() -> Value {
    let mut schemas = requests::bodies();
    let text = json!({"type": "string"});
    let list = json!({"type": "array"});
    let answers = [
        ("Object", json!({"type": "object"})),
        ("ChatCompletion", object(&["id", "object", "choices", "usage"], json!({"choices": list}))),
        ("Completion", object(&["id", "object", "choices", "usage"], json!({"choices": list}))),
        ("Response", object(&["id", "object", "status", "output"], json!({"output": list}))),
        ("Message", object(&["id", "type", "content", "usage"], json!({"content": list}))),
        ("TokenCount", object(&["input_tokens"], json!({"input_tokens": {"type": "integer"}}))),
        ("Embeddings", object(&["object", "data", "usage"], json!({"data": list}))),
        ("Scores", object(&["object", "data", "usage"], json!({"data": list}))),
        ("Ranking", object(&["id", "results", "usage"], json!({"results": list}))),
        ("ModelList", object(&["object", "data"], json!({"data": list}))),
        ("Tokens", object(&["count", "tokens", "max_model_len"], json!({"tokens": list}))),
        ("Text", object(&["prompt"], json!({"prompt": text}))),
        ("Version", object(&["version"], json!({"version": text}))),
    ];
    schemas.extend(answers.map(|(name, schema)| (name.to_owned(), schema)));
    Value::Object(schemas)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every `$ref` below a value.
    fn references(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(members) => {
                found.extend(members.get("$ref").and_then(Value::as_str).map(str::to_owned));
                members.values().for_each(|value| references(value, found));
            }
            Value::Array(items) => items.iter().for_each(|value| references(value, found)),
            _ => {}
        }
    }

    #[test]
    fn every_schema_that_is_named_is_there_and_the_other_way_round() {
        let mut named = Vec::new();
        references(&paths(), &mut named);
        let mut named: Vec<&str> = named.iter().filter_map(|name| name.strip_prefix("#/components/schemas/")).collect();
        named.sort_unstable();
        named.dedup();
        let schemas = schemas();
        let mut there: Vec<&str> = schemas.as_object().unwrap().keys().map(String::as_str).collect();
        there.sort_unstable();
        assert_eq!(named, there);
    }
}
