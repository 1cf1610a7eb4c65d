//! `/v1/responses`: OpenAI's newer API.

use axum::http::StatusCode;
use serde_json::json;
use stoker_engine::exec::sim::SimScript;

use crate::agent::*;
use crate::named_events::*;

#[tokio::test]
async fn a_response_is_kept_followed_and_forgotten() {
    let agent = Agent::new();
    let (status, first) = agent.post("/v1/responses", json!({"input": "hi", "instructions": "Be brief."})).await;
    assert_eq!(status, 200, "{first}");
    assert_eq!((&first["object"], &first["status"]), (&json!("response"), &json!("completed")));
    let item = &first["output"][0];
    assert_eq!((&item["type"], &item["content"][0]["text"]), (&json!("message"), &json!("All is well.")));
    assert_eq!(first["usage"]["input_tokens"], "[system]Be brief.[user]hi[assistant]".len());
    let id = first["id"].as_str().unwrap();
    assert_eq!(agent.get(&format!("/v1/responses/{id}")).await.1, first);

    let (_, second) = agent.post("/v1/responses", json!({"input": "and?", "previous_response_id": id})).await;
    let prompt = "[user]hi[assistant]All is well.[user]and?[assistant]";
    assert_eq!(second["usage"]["input_tokens"], prompt.len(), "instructions are not handed on: {second}");
    assert_eq!(second["previous_response_id"], id);

    let deleted = json_of(agent.send("DELETE", &format!("/v1/responses/{id}"), "").await).await;
    assert_eq!(deleted, (StatusCode::OK, json!({"id": id, "object": "response", "deleted": true})));
    assert_eq!(agent.get(&format!("/v1/responses/{id}")).await.0, 404);
    let lost = json!({"input": "x", "previous_response_id": id});
    let (status, answer) = agent.post("/v1/responses", lost).await;
    assert_eq!((status.as_u16(), &answer["error"]["param"]), (404, &json!("previous_response_id")));
    let (_, unkept) = agent.post("/v1/responses", json!({"input": "x", "store": false})).await;
    assert_eq!(agent.get(&format!("/v1/responses/{}", unkept["id"].as_str().unwrap())).await.0, 404);
}

#[tokio::test]
async fn a_streamed_response_adds_up_and_ends_with_the_whole() {
    let script = SimScript { completion: CALLING.into(), ..SimScript::default() };
    let agent = Agent::with_template(script, TOOLS_TEMPLATE);
    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}}]);
    let events = stream_of(&agent, "/v1/responses", &json!({"input": "hi", "tools": tools, "stream": true})).await;
    let mut order = types(&events);
    order.dedup();
    assert_eq!(
        order,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ]
    );
    let numbers: Vec<u64> = events.iter().map(|event| event["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let whole = &events.last().unwrap()["response"];
    let text: String = events
        .iter()
        .filter(|event| event["type"] == "response.output_text.delta")
        .map(|event| event["delta"].as_str().unwrap())
        .collect();
    assert_eq!((&whole["output"][0]["content"][0]["text"], text.as_str()), (&json!("Let me see."), "Let me see."));
    let call = &whole["output"][1];
    assert_eq!((&call["type"], &call["arguments"]), (&json!("function_call"), &json!(r#"{"x": 1}"#)));

    let asked = json!({"tools": tools, "previous_response_id": whole["id"], "input": [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "4"}]});
    let (status, next) = agent.post("/v1/responses", asked).await;
    let prompt = "<tool_call>{\"type\": \"function\", \"function\": {\"name\": \"f\", \"parameters\": {\"type\": \"object\"}}}\
                  [user]hi[assistant]Let me see.(f {\"x\": 1})[tool]4>";
    assert_eq!((status.as_u16(), &next["usage"]["input_tokens"]), (200, &json!(prompt.len())), "{next}");
    let (_, cut) = agent.post("/v1/responses", json!({"input": "x", "max_output_tokens": 3})).await;
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
}

#[tokio::test]
async fn refusals_of_the_responses_api_name_its_fields() {
    let agent = Agent::new();
    for (asked, param) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0]"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
            "input[0].content[0]",
        ),
        (json!({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}), "input[0].call_id"),
        (json!({"input": "x", "background": true}), "background"),
        (json!({"input": "x", "truncation": "auto"}), "truncation"),
        (json!({"input": "x", "max_output_tokens": 0}), "max_output_tokens"),
        (json!({"input": "x", "tools": [{"type": "web_search"}]}), "tools[0]"),
        (json!({"input": "x".repeat(3000)}), "input"),
        (json!({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}), "text.format.schema"),
        (json!({"input": "x", "reasoning": {"summary": "detailed"}}), "reasoning.summary"),
        (json!({"input": "x", "mood": 1}), "mood"),
    ] {
        let (status, answer) = agent.post("/v1/responses", asked).await;
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!(param)), "{answer}");
    }
}
