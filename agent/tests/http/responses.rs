//! `/v1/responses`: OpenAI's newer API.

use axum::{
    body::Body,
    http::{Request, StatusCode},
};
use serde_json::json;
use stoker_engine::{EngineLimits, exec::sim::SimScript};
use tower::ServiceExt;

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

    for (query, param) in
        [("stream=true", "stream"), ("starting_after=3", "starting_after"), ("include[]=x", "include"), ("x=1", "x")]
    {
        let (status, refused) = agent.get(&format!("/v1/responses/{id}?{query}")).await;
        assert!(status == 400 && refused["error"]["param"] == param, "{query}: {refused}");
    }
    assert_eq!(agent.get(&format!("/v1/responses/{id}?stream=false")).await.1, first, "what it is in any case");
    let deleted = json_of(agent.send("DELETE", &format!("/v1/responses/{id}"), "").await).await;
    assert_eq!(deleted, (StatusCode::OK, json!({"id": id, "object": "response", "deleted": true})));
    assert_eq!(agent.get(&format!("/v1/responses/{id}")).await.0, 404);
    let lost = json!({"input": "x", "previous_response_id": id});
    let (status, answer) = agent.post("/v1/responses", lost).await;
    assert_eq!((status.as_u16(), &answer["error"]["param"]), (404, &json!("previous_response_id")));
    let (_, unkept) = agent.post("/v1/responses", json!({"input": "x", "store": false})).await;
    assert_eq!(agent.get(&format!("/v1/responses/{}", unkept["id"].as_str().unwrap())).await.0, 404);
}

/// What one asks of a path, with a header of whose it is.
async fn asks(agent: &Agent, (name, value): (&str, &str), method: &str, path: &str, body: &str) -> serde_json::Value {
    let request = Request::builder().method(method).uri(path).header(name, value);
    let response = agent.router.clone().oneshot(request.body(Body::from(body.to_owned())).unwrap()).await.unwrap();
    json_of(response).await.1
}

#[tokio::test]
async fn a_response_is_there_for_the_key_and_the_tenant_that_asked_for_it() {
    let agent = Agent::new();
    let [ours, others, tenant] = [("authorization", "Bearer a"), ("x-api-key", "b"), ("x-stoker-tenant", "search")];
    for (owner, strangers) in [(ours, [others, tenant]), (tenant, [ours, ("x-stoker-tenant", "chat")])] {
        let kept = asks(&agent, owner, "POST", "/v1/responses", r#"{"input": "hi", "background": true}"#).await;
        let path = format!("/v1/responses/{}", kept["id"].as_str().unwrap());
        let follow = json!({"input": "and?", "previous_response_id": kept["id"]}).to_string();
        for stranger in strangers {
            for (method, path, body) in [
                ("GET", path.as_str(), ""),
                ("POST", &format!("{path}/cancel"), "{}"),
                ("DELETE", &path, ""),
                ("POST", "/v1/responses", &follow),
            ] {
                let answer = asks(&agent, stranger, method, path, body).await;
                assert_eq!(answer["error"]["code"], "response_not_found", "{stranger:?} {method} {path}: {answer}");
            }
        }
        assert_eq!(agent.get(&path).await.0, 404, "nobody in particular is a stranger, too");
        assert_eq!(
            asks(&agent, owner, "GET", &path, "").await["id"],
            kept["id"],
            "what strangers asked changed nothing"
        );
        assert_eq!(asks(&agent, owner, "DELETE", &path, "").await["deleted"], true);
    }
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
async fn log_probabilities_are_those_of_what_is_said() {
    let script = SimScript { completion: "<think>Hm.</think>Yes.".into(), ..SimScript::default() };
    let agent = Agent::with_template(script, THINKS);
    let asked = json!({"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let (status, whole) = agent.post("/v1/responses", asked.clone()).await;
    assert_eq!((status.as_u16(), &whole["top_logprobs"]), (200, &json!(2)), "{whole}");
    let logprobs = whole["output"][1]["content"][0]["logprobs"].as_array().unwrap();
    let tokens: Vec<&str> = logprobs.iter().map(|position| position["token"].as_str().unwrap()).collect();
    assert_eq!(tokens, ["Y", "e", "s", "."], "thoughts are not said: {whole}");
    assert!(logprobs.iter().all(|position| position["top_logprobs"].as_array().unwrap().len() == 2));

    let mut streamed = asked;
    streamed["stream"] = true.into();
    let events = stream_of(&agent, "/v1/responses", &streamed).await;
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    let told: Vec<_> = deltas.flat_map(|event| event["logprobs"].as_array().unwrap().clone()).collect();
    assert_eq!(&told, logprobs);
    let done = events.iter().find(|event| event["type"] == "response.output_text.done").unwrap();
    assert_eq!(done["logprobs"].as_array(), Some(logprobs));
    assert_eq!(events.last().unwrap()["response"]["output"][1]["content"][0]["logprobs"], json!(logprobs));
}

#[tokio::test]
async fn the_token_that_ends_an_answer_is_no_piece_of_it() {
    let agent = Agent::with(SimScript { completion: "Yes.".into(), ..SimScript::default() }, EngineLimits::default());
    let asked = json!({"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "stream": true});
    let events = stream_of(&agent, "/v1/responses", &asked).await;
    let deltas = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    let told: Vec<_> =
        deltas.map(|event| (event["delta"].as_str().unwrap(), event["logprobs"].as_array().unwrap().len())).collect();
    assert_eq!(told, [("Y", 1), ("e", 1), ("s", 1), (".", 1)]);
}

/// A response that has another status than this one.
async fn after(status: &str, agent: &Agent, id: &str) -> serde_json::Value {
    loop {
        let (code, response) = agent.get(&format!("/v1/responses/{id}")).await;
        assert_eq!(code, 200, "{response}");
        if response["status"] != status {
            return response;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn a_response_in_the_background_is_read_when_it_has_ended() {
    let agent = Agent::new();
    let (status, queued) = agent.post("/v1/responses", json!({"input": "hi", "background": true})).await;
    assert_eq!((status.as_u16(), &queued["status"], &queued["background"]), (200, &json!("queued"), &json!(true)));
    assert_eq!(queued["output"], json!([]));
    let id = queued["id"].as_str().unwrap();
    after("queued", &agent, id).await;
    let ended = after("in_progress", &agent, id).await;
    assert_eq!((&ended["status"], &ended["background"]), (&json!("completed"), &json!(true)), "{ended}");
    assert_eq!(ended["output"][0]["content"][0]["text"], "All is well.");
    let again = agent.post(&format!("/v1/responses/{id}/cancel"), json!({})).await;
    assert_eq!(again, (StatusCode::OK, ended), "one that has ended stays as it is");
    let (status, next) = agent.post("/v1/responses", json!({"input": "and?", "previous_response_id": id})).await;
    assert_eq!(status, 200, "{next}");
}

#[tokio::test]
async fn a_response_in_the_background_can_be_ended() {
    let script = SimScript {
        completion: "x".repeat(2000),
        step_time: std::time::Duration::from_millis(5),
        ..SimScript::default()
    };
    let agent = Agent::with(script, EngineLimits::default());
    for way in ["cancelled", "deleted"] {
        let (_, queued) = agent.post("/v1/responses", json!({"input": "hi", "background": true})).await;
        let id = queued["id"].as_str().unwrap();
        let (_, early) = agent.post("/v1/responses", json!({"input": "and?", "previous_response_id": id})).await;
        assert_eq!(early["error"]["param"], "previous_response_id", "it has no answer yet: {early}");
        assert_eq!(after("queued", &agent, id).await["status"], "in_progress");
        if way == "cancelled" {
            let (status, ended) = agent.post(&format!("/v1/responses/{id}/cancel"), json!({})).await;
            assert_eq!((status.as_u16(), &ended["status"]), (200, &json!("cancelled")));
        } else {
            assert_eq!(agent.send("DELETE", &format!("/v1/responses/{id}"), "").await.status(), 200);
        }
        agent.wait_until("its sequence has left", |load| load.running + load.waiting == 0).await;
        let (status, kept) = agent.get(&format!("/v1/responses/{id}")).await;
        match way {
            "cancelled" => assert_eq!(kept["status"], "cancelled"),
            _ => assert_eq!(status, 404, "{kept}"),
        }
    }
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
        (json!({"input": "x", "background": true, "store": false}), "background"),
        (json!({"input": "x", "background": true, "stream": true}), "background"),
        (json!({"input": "x", "include": ["file_search_call.results"]}), "include"),
        (json!({"input": "x", "top_logprobs": 3}), "top_logprobs"),
        (json!({"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 21}), "top_logprobs"),
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
