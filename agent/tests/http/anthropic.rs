//! `/v1/messages`: Anthropic's API.

use axum::body::Body;
use axum::http::Request;
use serde_json::Value;
use serde_json::json;
use stoker_engine::{EngineLimits, exec::sim::SimScript};
use tower::ServiceExt;

use crate::agent::*;
use crate::named_events::*;

/// Tokens of the prompt that were computed and not kept, that were cached, and that the cache got.
fn prompt_parts(answer: &Value) -> [usize; 3] {
    ["input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"]
        .map(|name| answer["usage"][name].as_u64().expect("a count") as usize)
}

#[tokio::test]
async fn a_message_of_anthropics_api_is_answered_in_its_form() {
    let agent = Agent::new();
    let asked = json!({"model": "sim", "max_tokens": 100, "system": "Be brief.", "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}]});
    let (status, answer) = agent.post("/v1/messages", asked.clone()).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["content"], json!([{"type": "text", "text": "All is well."}]));
    assert_eq!((&answer["type"], &answer["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("end_turn"), &json!(null)));
    let n_prompt = "[system]Be brief.[user]hi[assistant]".len();
    assert_eq!(prompt_parts(&answer), [n_prompt % 16, 0, n_prompt / 16 * 16], "the cache got whole blocks");
    assert!(answer["id"].as_str().unwrap().starts_with("msg_"), "{answer}");
    let mut counted = asked.clone();
    counted.as_object_mut().unwrap().remove("max_tokens");
    assert_eq!(agent.post("/v1/messages/count_tokens", counted).await.1, json!({"input_tokens": n_prompt}));

    let mut stopped = asked.clone();
    stopped["stop_sequences"] = json!(["is"]);
    let (_, answer) = agent.post("/v1/messages", stopped).await;
    assert_eq!(prompt_parts(&answer), [n_prompt % 16, n_prompt / 16 * 16, 0], "which are read now");
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("stop_sequence"), &json!("is")));

    let mut streamed = asked;
    streamed["stream"] = json!(true);
    let events = stream_of(&agent, "/v1/messages", &streamed).await;
    let order = types(&events);
    assert_eq!(order[..3], ["message_start", "ping", "content_block_start"]);
    assert!(order[3..order.len() - 3].iter().all(|name| *name == "content_block_delta"), "{order:?}");
    assert_eq!(order[order.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, "All is well.");
    assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], "end_turn");
    assert_eq!(events[events.len() - 2]["usage"]["output_tokens"], 13);
}

#[tokio::test]
async fn a_tool_of_anthropics_api_is_called_and_answered() {
    let script = SimScript { completion: CALLING.into(), ..SimScript::default() };
    let agent = Agent::with_template(script, TOOLS_TEMPLATE);
    let asked = json!({"max_tokens": 100, "tools": [{"name": "f", "input_schema": {"z": 1, "a": 2}}], "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "so"},
                                          {"type": "tool_use", "id": "t1", "name": "f", "input": {"z": 1, "a": 2}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "4"},
                                     {"type": "text", "text": "and?"}]}]});
    let (status, answer) = agent.post("/v1/messages", asked.clone()).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["stop_reason"], "tool_use");
    let call = &answer["content"][1];
    assert_eq!((&call["type"], &call["name"], &call["input"]), (&json!("tool_use"), &json!("f"), &json!({"x": 1})));
    let prompt = "<tool_call>{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"z\": 1, \"a\": 2}}}\
                  [user]hi[assistant]so(f {\"z\": 1, \"a\": 2})[tool]4[user]and?>";
    let n_prompt: usize = prompt_parts(&answer).iter().sum();
    assert_eq!(n_prompt, prompt.len(), "schemas and arguments keep the order of their members");

    let mut streamed = asked;
    streamed["stream"] = json!(true);
    let events = stream_of(&agent, "/v1/messages", &streamed).await;
    let starts: Vec<&Value> = events.iter().filter(|event| event["type"] == "content_block_start").collect();
    assert_eq!((&starts[0]["content_block"]["type"], &starts[1]["index"]), (&json!("text"), &json!(1)));
    assert_eq!(starts[1]["content_block"]["input"], json!({}));
    let input: String = events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
    assert_eq!(input, r#"{"x": 1}"#);
}

#[tokio::test]
async fn refusals_of_anthropics_api_have_its_form_and_name_its_fields() {
    let agent = Agent::new();
    let asked = |extra: Value| {
        let mut body = json!({"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]);
    let result = json!([{"role": "user", "content": [{"type": "tool_result", "content": "4"}]}]);
    for (extra, param) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": image}), "messages[0].content[0]"),
        (json!({"messages": result}), "messages[0].content[0].tool_use_id"),
        (json!({"messages": [{"role": "system", "content": "x"}]}), "messages[0].role"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}]}]}),
            "messages[0].content[0].mood",
        ),
        (json!({"stop_sequences": [""]}), "stop_sequences"),
        (json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}), "tools[0]"),
        (json!({"tools": [{"name": "f"}]}), "tools[0].input_schema"),
        (json!({"tool_choice": {"type": "tool"}}), "tool_choice"),
        (json!({"thinking": {"type": "enabled"}}), "thinking.budget_tokens"),
        (json!({"container": "x"}), "container"),
    ] {
        let (status, answer) = agent.post("/v1/messages", asked(extra)).await;
        let error = &answer["error"];
        assert_eq!((status.as_u16(), &error["param"]), (400, &json!(param)), "{answer}");
        assert_eq!((&answer["type"], &error["type"]), (&json!("error"), &json!("invalid_request_error")));
    }
    let (status, answer) = agent.post("/v1/messages", asked(json!({"model": "claude"}))).await;
    assert_eq!((status.as_u16(), &answer["error"]["type"]), (404, &json!("not_found_error")));
    let request = Request::post("/v1/messages").header("anthropic-version", "1999-01-01");
    let request = request.body(Body::from(asked(json!({})).to_string())).unwrap();
    let (status, answer) = json_of(agent.router.clone().oneshot(request).await.unwrap()).await;
    assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!("anthropic-version")));
}

#[tokio::test]
async fn the_token_that_ends_a_message_is_no_piece_of_it() {
    let agent = Agent::with(SimScript { completion: "Yes.".into(), ..SimScript::default() }, EngineLimits::default());
    let asked =
        json!({"model": "sim", "max_tokens": 9, "stream": true, "messages": [{"role": "user", "content": "x"}]});
    let events = stream_of(&agent, "/v1/messages", &asked).await;
    let told: Vec<_> = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(told, ["Y", "e", "s", "."]);
}
