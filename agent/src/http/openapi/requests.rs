//! The fields of requests, as JSON schemas: names, types and ranges that hold for every model. What a model or a device does not do is
//! refused beyond them. `agent/tests/http/fields.rs` sends what no schema allows, and what one endpoint has and another has not.

use serde_json::{Map, Value, json};

use crate::http::neutral::{Neutral, table, table_of_chat};

/// Schemas of bodies, by their names.
pub(super) fn bodies() -> Map<String, Value> {
    [
        ("ChatRequest", body(&["messages"], [generation(), structure(), prompt_of_chat(), chat()])),
        ("CompletionRequest", body(&["prompt"], [generation(), structure(), completion()])),
        ("ResponseRequest", body(&["input"], [responses()])),
        ("MessageRequest", body(&["max_tokens", "messages"], [message(), message_prompt()])),
        ("MessagesToCount", body(&["messages"], [message_prompt()])),
        ("EmbeddingRequest", body(&["input"], [standing(), truncation(), embedding()])),
        ("ScoreRequest", body(&["text_1", "text_2"], [standing(), truncation(), comparison(), sides()])),
        ("RerankRequest", body(&["query", "documents"], [standing(), truncation(), comparison(), ranking()])),
        ("TokenizeRequest", body(&["prompt"], [prompt_of_chat(), tokenize()])),
        ("DetokenizeRequest", body(&["tokens"], [json!({"model": text(), "tokens": list(token())})])),
    ]
    .into_iter()
    .map(|(name, schema)| (name.to_owned(), schema))
    .collect()
}

fn body<const N: usize>(required: &[&str], parts: [Value; N]) -> Value {
    let parts = parts.into_iter().filter_map(|part| if let Value::Object(part) = part { Some(part) } else { None });
    let properties: Map<String, Value> = parts.flatten().collect();
    json!({"type": "object", "required": required, "properties": properties, "additionalProperties": false})
}

fn text() -> Value {
    json!({"type": "string"})
}

fn name() -> Value {
    json!({"type": "string", "minLength": 1, "maxLength": 128})
}

fn flag() -> Value {
    json!({"type": "boolean"})
}

fn integer(minimum: i64, maximum: i64) -> Value {
    json!({"type": "integer", "minimum": minimum, "maximum": maximum})
}

/// More than any context has.
fn count_from(minimum: i64) -> Value {
    integer(minimum, u32::MAX.into())
}

fn number(minimum: f64, maximum: f64) -> Value {
    json!({"type": "number", "minimum": minimum, "maximum": maximum})
}

fn one_of<const N: usize>(words: [&str; N]) -> Value {
    json!({"enum": words.to_vec()})
}

fn list(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

fn up_to(n_items: usize, items: Value) -> Value {
    json!({"type": "array", "items": items, "maxItems": n_items})
}

fn any_of<const N: usize>(schemas: [Value; N]) -> Value {
    json!({"anyOf": schemas.to_vec()})
}

fn object() -> Value {
    json!({"type": "object"})
}

fn closed(required: &[&str], properties: Value) -> Value {
    json!({"type": "object", "required": required, "properties": properties, "additionalProperties": false})
}

/// An id; that it is one of the model's vocabulary is checked beyond this.
fn token() -> Value {
    count_from(0)
}

fn labels() -> Value {
    json!({"type": "object", "additionalProperties": text()})
}

/// At the values that change nothing.
fn neutral(fields: Vec<Neutral>) -> Value {
    let schema = |Neutral { field, values, .. }: Neutral| {
        (field.to_owned(), if values.is_empty() { json!({"type": "null"}) } else { json!({"enum": values}) })
    };
    Value::Object(fields.into_iter().map(schema).collect())
}

fn merged<const N: usize>(parts: [Value; N]) -> Value {
    let parts = parts.into_iter().filter_map(|part| if let Value::Object(part) = part { Some(part) } else { None });
    Value::Object(parts.flatten().collect())
}

/// Who asks, and for whom: it changes no answer.
fn callers() -> Value {
    json!({"user": text(), "safety_identifier": text(), "prompt_cache_key": text()})
}

fn standing() -> Value {
    json!({"priority": integer(i32::MIN.into(), i32::MAX.into()), "deadline_ms": integer(1, 86_400_000),
           "cache_salt": {"type": "string", "minLength": 1, "maxLength": 1024}})
}

fn truncation() -> Value {
    json!({"truncate_prompt_tokens": integer(-1, i64::MAX), "truncation_side": one_of(["left", "right"])})
}

fn sampling() -> Value {
    json!({
        "temperature": number(0.0, 2.0), "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": "integer", "minimum": -1}, "min_p": number(0.0, 1.0),
        "presence_penalty": number(-2.0, 2.0), "frequency_penalty": number(-2.0, 2.0),
        "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
        "seed": {"type": "integer", "minimum": i64::MIN, "maximum": u64::MAX},
        "logit_bias": {"type": "object", "additionalProperties": number(-100.0, 100.0)},
        "stop": stop(), "stop_token_ids": up_to(128, token()), "ignore_eos": flag(), "min_tokens": count_from(0),
        "allowed_token_ids": {"type": "array", "items": token(), "minItems": 1}, "bad_words": bad_words(),
    })
}

fn stop() -> Value {
    let stop = json!({"type": "string", "minLength": 1});
    any_of([stop.clone(), up_to(16, stop)])
}

fn bad_words() -> Value {
    up_to(128, json!({"type": "string", "minLength": 1, "maxLength": 256}))
}

fn generation() -> Value {
    let stream_options = closed(
        &[],
        json!({"include_usage": flag(), "include_obfuscation": {"enum": [false]}, "continuous_usage_stats": flag()}),
    );
    let own = json!({
        "model": text(), "metadata": labels(), "prompt_cache_retention": text(),
        "service_tier": one_of(["auto", "default", ""]), "skip_special_tokens": {"enum": [true]},
        "max_tokens": count_from(1), "max_completion_tokens": count_from(1), "n": integer(1, 128),
        "stream": flag(), "stream_options": stream_options, "prompt_logprobs": integer(0, 20), "request_id": name(),
        "include_stop_str_in_output": flag(), "return_token_ids": flag(), "return_tokens_as_token_ids": flag(),
        "logprob_token_ids": up_to(128, token()),
    });
    merged([own, callers(), standing(), truncation(), sampling(), neutral(table())])
}

/// A schema, as JSON or as text that holds JSON.
fn schema() -> Value {
    any_of([object(), flag(), text()])
}

fn structure() -> Value {
    let named =
        closed(&["schema"], json!({"name": text(), "description": text(), "schema": schema(), "strict": flag()}));
    let format = closed(
        &["type"],
        json!({"type": one_of(["text", "json_object", "json_schema"]), "json_schema": named, "schema": schema()}),
    );
    let choices =
        json!({"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 4096});
    let outputs = json!({
        "json": schema(), "json_object": flag(), "regex": text(), "choice": choices, "grammar": text(),
        "structural_tag": {"type": "null"}, "disable_any_whitespace": {"enum": [false]},
        "disable_additional_properties": {"enum": [false]}, "disable_fallback": flag(),
        "whitespace_pattern": {"type": "null"},
    });
    json!({
        "response_format": format, "structured_outputs": closed(&[], outputs),
        "guided_json": schema(), "guided_regex": text(), "guided_choice": choices, "guided_grammar": text(),
        "guided_whitespace_pattern": {"type": "null"},
    })
}

fn parts_of_text() -> Value {
    let part = json!({"type": "object", "required": ["type", "text"], "properties": {
        "type": one_of(["text", "refusal", "input_text", "output_text"]), "text": text()}});
    any_of([text(), json!({"type": "array", "items": any_of([part, text()]), "minItems": 1})])
}

fn prompt_of_chat() -> Value {
    let call = json!({"type": "object", "required": ["id", "function"], "properties": {
        "id": text(), "type": one_of(["function"]), "function": {"type": "object", "required": ["name", "arguments"],
            "properties": {"name": text(), "arguments": text()}}}});
    let message = json!({"type": "object", "required": ["role", "content"], "properties": {
        "role": {"type": "string", "minLength": 1, "maxLength": 64}, "content": parts_of_text(), "name": text(),
        "tool_calls": list(call), "tool_call_id": text(), "refusal": text(), "reasoning": text(),
        "reasoning_content": text()}});
    let function = json!({"type": "object", "required": ["name"], "properties": {
            "name": name(), "parameters": object(), "strict": flag()}});
    let tool = json!({"type": "object", "required": ["type", "function"],
        "properties": {"type": one_of(["function"]), "function": function}});
    let by_name = json!({"type": "object", "required": ["type", "function"], "properties": {
        "type": one_of(["function"]), "function": {"type": "object", "required": ["name"], "properties": {"name": text()}}}});
    let allowed = json!({"type": "object", "required": ["type", "allowed_tools"], "properties": {
        "type": one_of(["allowed_tools"]), "allowed_tools": {"type": "object", "required": ["mode", "tools"], "properties": {
            "mode": one_of(["auto", "required"]), "tools": {"type": "array", "items": by_name, "minItems": 1}}}}});
    json!({
        "model": text(), "messages": {"type": "array", "items": message, "minItems": 1}, "tools": list(tool),
        "tool_choice": any_of([one_of(["none", "auto", "required"]), by_name, allowed]), "parallel_tool_calls": flag(),
        "add_generation_prompt": flag(), "continue_final_message": flag(), "documents": list(json!({})),
        "chat_template_kwargs": object(), "reasoning_effort": efforts(), "chat_template": text(),
        "add_special_tokens": flag(),
    })
}

fn efforts() -> Value {
    one_of(["none", "minimal", "low", "medium", "high", "xhigh"])
}

fn chat() -> Value {
    let own = json!({"logprobs": flag(), "top_logprobs": integer(0, 20), "echo": flag(), "include_reasoning": flag(),
                     "thinking_token_budget": count_from(-1)});
    merged([own, neutral(table_of_chat())])
}

/// Texts, or their tokens.
fn prompts() -> Value {
    let lists = json!({"type": "array", "items": {"type": "array", "items": token(), "minItems": 1}, "minItems": 1});
    let several = |items: Value| json!({"type": "array", "items": items, "minItems": 1});
    any_of([text(), several(text()), several(token()), lists])
}

fn completion() -> Value {
    json!({"prompt": prompts(), "logprobs": integer(0, 20), "echo": flag(), "suffix": {"enum": [""]},
           "best_of": count_from(1), "add_special_tokens": flag()})
}

fn responses() -> Value {
    let part = json!({"type": "object", "required": ["type", "text"], "properties": {"type": text(), "text": text()}});
    let content = any_of([text(), list(part)]);
    // Of items that come back as they were given.
    let echoed = json!({"id": {}, "status": {}, "summary": {}, "encrypted_content": {}, "namespace": {}, "phase": {}});
    let item = |required: &[&str], members: Value| closed(required, merged([members, echoed.clone()]));
    let roles = one_of(["user", "assistant", "system", "developer"]);
    let item = any_of([
        item(&["role", "content"], json!({"type": one_of(["message"]), "role": roles, "content": content})),
        item(
            &["type", "call_id", "name", "arguments"],
            json!({"type": one_of(["function_call"]), "call_id": text(), "name": text(), "arguments": text()}),
        ),
        item(
            &["type", "call_id", "output"],
            json!({"type": one_of(["function_call_output"]), "call_id": text(), "output": content}),
        ),
        item(&["type"], json!({"type": one_of(["reasoning"]), "content": content})),
    ]);
    let tool = json!({"type": "object", "required": ["type", "name"], "properties": {"type": one_of(["function"]),
        "name": name(), "description": text(), "parameters": object(), "strict": flag()}, "additionalProperties": false});
    let by_name = json!({"type": "object", "required": ["type", "name"], "properties": {
        "type": one_of(["function"]), "name": text()}});
    let allowed = json!({"type": "object", "required": ["type", "tools"], "properties": {"type": one_of(["allowed_tools"]),
        "mode": one_of(["auto", "required"]), "tools": {"type": "array", "items": by_name, "minItems": 1}}});
    let format = any_of([
        closed(&["type"], json!({"type": one_of(["text", "json_object"])})),
        closed(
            &["type", "schema"],
            json!({"type": one_of(["json_schema"]), "name": text(), "description": text(), "schema": schema(), "strict": flag()}),
        ),
    ]);
    let own = json!({
        "model": text(), "input": any_of([text(), json!({"type": "array", "items": item, "minItems": 1})]),
        "instructions": text(), "previous_response_id": text(), "max_output_tokens": count_from(1), "stream": flag(),
        "store": flag(), "background": flag(), "metadata": labels(), "service_tier": one_of(["auto", "default", ""]),
        "include": list(one_of(["message.output_text.logprobs", "reasoning.encrypted_content"])),
        "top_logprobs": integer(0, 20), "tools": list(tool), "parallel_tool_calls": flag(),
        "tool_choice": any_of([one_of(["none", "auto", "required"]), by_name, allowed]),
        "text": closed(&[], json!({"format": format, "verbosity": one_of(["medium"])})),
        "reasoning": closed(&[], json!({"effort": efforts(), "summary": one_of(["auto"]), "generate_summary": one_of(["auto"])})),
        "chat_template_kwargs": object(), "thinking_token_budget": count_from(-1), "request_id": name(),
    });
    merged([own, callers(), standing(), sampling(), neutral(crate::http::responses::neutral_fields())])
}

fn blocks() -> Value {
    let block = json!({"type": "object", "required": ["type", "text"],
        "properties": {"type": one_of(["text"]), "text": text()}});
    any_of([text(), list(block)])
}

fn message_prompt() -> Value {
    let content = json!({"type": "object", "required": ["type", "text"], "properties": {
        "type": one_of(["text", "thinking", "tool_use", "tool_result"]), "text": text(), "thinking": text(),
        "id": text(), "name": text(), "tool_use_id": text()}});
    let message = json!({"type": "object", "required": ["role", "content"], "properties": {
        "role": one_of(["user", "assistant"]), "content": any_of([text(), list(content)])}});
    let tool = json!({"type": "object", "required": ["name", "input_schema"], "properties": {
        "type": one_of(["custom"]), "name": name(), "description": text(), "input_schema": object(),
        "strict": flag()}});
    let choice = closed(
        &["type"],
        json!({"type": one_of(["auto", "any", "none", "tool"]), "name": text(), "disable_parallel_tool_use": flag()}),
    );
    let thinking = closed(
        &["type"],
        json!({"type": one_of(["disabled", "adaptive", "enabled"]), "budget_tokens": count_from(0),
               "display": one_of(["summarized", "omitted"])}),
    );
    let format = closed(&["type", "schema"], json!({"type": one_of(["json_schema"]), "schema": object()}));
    json!({
        "model": text(), "system": blocks(), "messages": {"type": "array", "items": message, "minItems": 1},
        "tools": list(tool), "tool_choice": choice, "thinking": thinking,
        "output_config": closed(&[], json!({"format": format})), "cache_control": object(),
    })
}

fn message() -> Value {
    let stop = json!({"type": "string", "minLength": 1});
    let own = json!({
        "max_tokens": count_from(1), "temperature": number(0.0, 2.0),
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "top_k": {"type": "integer", "minimum": -1},
        "stream": flag(), "stop_sequences": up_to(16, stop), "metadata": closed(&[], json!({"user_id": text()})),
        "service_tier": one_of(["auto", "standard_only", ""]), "speed": one_of(["standard"]),
        "user_profile_id": text(), "workspace_id": text(),
    });
    merged([own, standing()])
}

fn embedding() -> Value {
    json!({"model": text(), "input": prompts(), "encoding_format": one_of(["float", "base64"]), "user": text(),
           "dimensions": count_from(1), "add_special_tokens": flag()})
}

fn texts() -> Value {
    let one = any_of([text(), closed(&["text"], json!({"text": text()}))]);
    any_of([one.clone(), json!({"type": "array", "items": one, "minItems": 1, "maxItems": 2048})])
}

fn comparison() -> Value {
    json!({"model": text(), "user": text(), "request_id": name(), "instruction": text(), "use_activation": flag(),
           "chat_template_kwargs": object(), "max_tokens_per_query": count_from(0), "max_tokens_per_doc": count_from(0),
           "mm_processor_kwargs": {"enum": [{}]}})
}

fn sides() -> Value {
    let names = ["text_1", "text_2", "queries", "documents", "items", "data_1", "data_2"];
    names.into_iter().map(|name| (name.to_owned(), texts())).collect()
}

fn ranking() -> Value {
    json!({"query": any_of([text(), closed(&["text"], json!({"text": text()}))]), "documents": texts(),
           "top_n": count_from(0), "return_documents": flag()})
}

fn tokenize() -> Value {
    json!({"prompt": text(), "return_token_strs": flag()})
}
