//! What an answer says beside its text: tool calls, reasoning, structure.

use http_body_util::BodyExt;
use serde_json::Value;
use serde_json::json;
use stoker_engine::EngineLimits;
use stoker_engine::exec::sim::SimScript;

use crate::agent::*;

pub(crate) const CALLS: &str = "{{ tools | tojson }}<tool_call>";

/// What a simulated model says that would say `completion`, and what its end is called.
async fn constrained(completion: &str, template: &str, fields: Value) -> (Value, Value) {
    let agent = Agent::with_template(SimScript { completion: completion.into(), ..SimScript::default() }, template);
    let (status, answer) = agent.post("/v1/chat/completions", chat(fields)).await;
    assert_eq!(status, 200, "{answer}");
    (answer["choices"][0]["message"].clone(), answer["choices"][0]["finish_reason"].clone())
}

#[tokio::test]
async fn tool_calls_are_parsed_the_same_in_a_stream_and_in_a_whole_answer() {
    let completion = r#"I look.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>"#;
    let script = SimScript { completion: completion.into(), ..SimScript::default() };
    let agent = Agent::with_template(script, "{{ tools | tojson }}<tool_call>");
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {}}}]);
    let (_, whole) = agent.post("/v1/chat/completions", chat(json!({"tools": tools}))).await;
    let message = &whole["choices"][0]["message"];
    assert_eq!((&message["content"], &whole["choices"][0]["finish_reason"]), (&json!("I look."), &json!("tool_calls")));
    let function = json!({"name": "weather", "arguments": "{\"city\": \"Oslo\"}"});
    assert_eq!(message["tool_calls"][0]["function"], function);

    let body = chat(json!({"tools": tools, "stream": true})).to_string();
    let response = agent.send("POST", "/v1/chat/completions", &body).await;
    let events = events(&Stream { body: response.into_body() }.rest().await);
    let deltas: Vec<&Value> = events.iter().map(|event| &event["choices"][0]["delta"]).collect();
    let text: String = deltas.iter().filter_map(|delta| delta["content"].as_str()).collect();
    let calls: Vec<&Value> = deltas.iter().filter_map(|delta| delta["tool_calls"].get(0)).collect();
    let arguments: String = calls.iter().filter_map(|call| call["function"]["arguments"].as_str()).collect();
    assert_eq!((text.as_str(), arguments.as_str()), ("I look.", "{\"city\": \"Oslo\"}"));
    assert_eq!((&calls[0]["index"], &calls[0]["function"]["name"]), (&json!(0), &json!("weather")));
    assert!(
        calls.len() > 10 && calls[1..].iter().all(|call| call["id"].is_null()),
        "arguments come as they are written"
    );
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");

    let (_, plain) = agent.post("/v1/chat/completions", chat(json!({"tools": tools, "tool_choice": "none"}))).await;
    assert_eq!(plain["choices"][0]["message"]["content"], completion, "no tool was offered, so nothing is a call");
}

#[tokio::test]
async fn reasoning_has_fields_of_its_own_whole_and_in_a_stream_and_goes_back_into_the_prompt() {
    let completion = "<think>\nA <tool_call> may help.\n</think>\n\n<tool_call>{\"name\": \"f\"}</tool_call>";
    let agent = Agent::with_template(SimScript { completion: completion.into(), ..SimScript::default() }, THINKS);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let (_, whole) = agent.post("/v1/chat/completions", chat(json!({"tools": tools}))).await;
    let message = &whole["choices"][0]["message"];
    assert_eq!(message["reasoning"], "A <tool_call> may help.");
    assert_eq!((&message["reasoning_content"], &message["content"]), (&message["reasoning"], &Value::Null));
    assert_eq!(message["tool_calls"][0]["function"], json!({"name": "f", "arguments": "{}"}));
    assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");

    let body = chat(json!({"tools": tools, "stream": true})).to_string();
    let stream = Stream { body: agent.send("POST", "/v1/chat/completions", &body).await.into_body() };
    let events = events(&stream.rest().await);
    let of = |field: &str| -> String {
        events.iter().filter_map(|event| event["choices"][0]["delta"][field].as_str()).collect()
    };
    let thought = "A <tool_call> may help.";
    assert_eq!([of("reasoning"), of("reasoning_content"), of("content")], [thought, thought, ""]);

    let hidden = chat(json!({"tools": tools, "include_reasoning": false}));
    let (_, hidden) = agent.post("/v1/chat/completions", hidden).await;
    assert_eq!(hidden["choices"][0]["message"]["reasoning"], Value::Null);

    let count = async |extra: Value| {
        let mut said = json!({"role": "assistant", "content": "x"});
        said.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let (_, answer) = agent.post("/tokenize", json!({"messages": [said]})).await;
        answer["count"].as_u64().unwrap()
    };
    let plain = count(json!({})).await;
    assert_eq!(count(json!({"reasoning": "abc"})).await, plain + 3);
    assert_eq!(count(json!({"reasoning_content": "abcd"})).await, plain + 4);
}

#[tokio::test]
async fn thoughts_are_bounded_by_a_budget_of_tokens() {
    let completion = "<think>abcdefghijklmnopqrst</think>Done.";
    let agent = Agent::with_template(SimScript { completion: completion.into(), ..SimScript::default() }, THINKS);
    let reasoning = async |fields: Value| {
        let (status, answer) = agent.post("/v1/chat/completions", chat(fields)).await;
        assert_eq!(status, 200, "{answer}");
        answer["choices"][0]["message"]["reasoning"].clone()
    };
    assert_eq!(reasoning(json!({"thinking_token_budget": 4})).await, "abcd");
    assert_eq!(reasoning(json!({"thinking_token_budget": 0})).await, Value::Null);
    let choice = json!({"thinking_token_budget": 5, "structured_outputs": {"choice": ["yes", "no"]}});
    assert_eq!(reasoning(choice).await, "abcde", "also beside a grammar");
    for unbounded in [json!({"thinking_token_budget": -1}), json!({"thinking_token_budget": 100}), json!({})] {
        assert_eq!(reasoning(unbounded).await, "abcdefghijklmnopqrst");
    }
    for wrong in [json!(-2), json!(0.5), json!("many")] {
        let body = chat(json!({"thinking_token_budget": wrong}));
        let (status, refused) = agent.post("/v1/chat/completions", body).await;
        assert_eq!((status.as_u16(), &refused["error"]["param"]), (400, &json!("thinking_token_budget")), "{wrong}");
    }
    let thinking = json!({"type": "enabled", "budget_tokens": 1024});
    let messages = json!([{"role": "user", "content": "x"}]);
    let body = json!({"max_tokens": 50, "messages": messages, "thinking": thinking, "model": "sim"});
    let (status, refused) = Agent::new().post("/v1/messages", body).await;
    assert_eq!(status, 400, "a model that does not think is not told how much: {refused}");
}

#[tokio::test]
async fn a_call_cut_off_by_its_length_is_not_called_complete() {
    let completion = r#"<tool_call>{"name": "f", "arguments": {"x": "a long text"}}</tool_call>"#;
    let agent = Agent::with_template(SimScript { completion: completion.into(), ..SimScript::default() }, THINKS);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let (_, answer) = agent.post("/v1/chat/completions", chat(json!({"tools": tools, "max_tokens": 50}))).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], r#"{"x": "a lon"#);
}

#[tokio::test]
async fn an_answer_has_the_structure_that_was_asked_for() {
    let schema = json!({"type": "object", "required": ["city"], "additionalProperties": false,
                        "properties": {"city": {"enum": ["Oslo", "Rome"]}}});
    let named = json!({"type": "json_schema", "json_schema": {"name": "place", "strict": true, "schema": schema}});
    for (fields, expected) in [
        (json!({"response_format": named}), r#"{"city":"Oslo"}"#),
        (json!({"structured_outputs": {"json": schema}}), r#"{"city":"Oslo"}"#),
        (json!({"guided_choice": ["Paris", "Oslo"]}), "Oslo"),
        (json!({"guided_regex": "[a-c]{3}"}), "abc"),
        (json!({"structured_outputs": {"grammar": "root ::= \"so \" [xy]+ \"!\""}}), "so xy!"),
    ] {
        // The simulated model would say this; what the grammar forbids gives way.
        let (message, reason) = constrained(expected, TEMPLATE, fields.clone()).await;
        assert_eq!((&message["content"], &reason), (&json!(expected), &json!("stop")), "{fields}");
        let (message, _) = constrained("zzzzzzzzzzzzzzzzzzzzzzzz", TEMPLATE, fields.clone()).await;
        let text = message["content"].as_str().unwrap();
        assert!(!text.is_empty() && !text.starts_with("zz"), "{fields}: {text}");
    }
    let agent =
        Agent::with(SimScript { completion: "cabbage".into(), ..SimScript::default() }, EngineLimits::default());
    let (_, answer) = agent.post("/v1/completions", json!({"prompt": "x", "guided_regex": "[a-c]{3}"})).await;
    assert_eq!(answer["choices"][0]["text"], "cab");
    let cut = json!({"response_format": named, "max_tokens": 4});
    let (message, reason) = constrained(r#"{"city": "Oslo"}"#, TEMPLATE, cut).await;
    assert_eq!((message["content"].as_str().unwrap().len(), reason), (4, json!("length")), "no claim of validity");
}

#[tokio::test]
async fn what_grammars_hold_is_a_metric() {
    let agent = Agent::new();
    let held = async || {
        agent.replica.tick();
        let body = agent.send("GET", "/metrics", "").await.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8(body.to_vec()).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("stoker_grammar_memory_bytes "));
        line.expect("it is there").parse::<u64>().unwrap()
    };
    assert_eq!(held().await, 0);
    let body = json!({"prompt": "x", "max_tokens": 2, "guided_choice": ["Oslo".repeat(1000)]});
    assert_eq!(agent.post("/v1/completions", body).await.0, 200);
    let kept = held().await;
    assert!((500_000..5_000_000).contains(&kept), "{kept}");
}

#[tokio::test]
async fn a_call_that_is_required_is_made_and_its_arguments_follow_the_schema() {
    let parameters = json!({"type": "object", "required": ["n"], "additionalProperties": false,
                            "properties": {"n": {"type": "integer", "minimum": 7, "maximum": 7}}});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let tools = json!([tool("f"), tool("g")]);
    let named = json!({"type": "function", "function": {"name": "g"}});
    for (choice, allowed) in [(json!("required"), ["f", "g"]), (named, ["g", "g"])] {
        let fields = json!({"tools": tools, "tool_choice": choice, "parallel_tool_calls": false});
        let (message, reason) = constrained("I will not call anything at all, ever.", CALLS, fields).await;
        let call = &message["tool_calls"][0]["function"];
        assert!(allowed.contains(&call["name"].as_str().unwrap()), "{message}");
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments, json!({"n": 7}));
        assert_eq!((reason, message["tool_calls"].as_array().unwrap().len()), (json!("tool_calls"), 1));
    }
}

#[tokio::test]
async fn a_strict_function_is_called_by_its_schema_where_the_model_may_choose() {
    let parameters = json!({"type": "object", "required": ["n"], "additionalProperties": false,
                            "properties": {"n": {"type": "integer", "minimum": 7, "maximum": 7}}});
    let tools = |strict: Value| {
        let function = json!({"name": "f", "parameters": parameters, "strict": strict});
        json!({"tools": [{"type": "function", "function": function}], "parallel_tool_calls": false})
    };
    let says = r#"I look.<tool_call>{"name": "f", "arguments": {"m": true}}</tool_call>"#;
    for (strict, expected) in
        [(json!(true), json!({"n": 7})), (json!(false), json!({"m": true})), (json!(null), json!({"m": true}))]
    {
        let (message, reason) = constrained(says, CALLS, tools(strict.clone())).await;
        assert_eq!((&message["content"], &reason), (&json!("I look."), &json!("tool_calls")), "strict {strict}");
        let arguments = message["tool_calls"][0]["function"]["arguments"].as_str().unwrap();
        assert_eq!(serde_json::from_str::<Value>(arguments).unwrap(), expected, "strict {strict}");
    }
    let (message, reason) = constrained("I call nothing < at all.", CALLS, tools(json!(true))).await;
    assert_eq!((&message["content"], reason), (&json!("I call nothing < at all."), json!("stop")));

    let agent = Agent::with_template(SimScript::default(), CALLS);
    let wrong =
        json!({"name": "f", "strict": true, "parameters": {"type": "object", "properties": {"x": {"type": "y"}}}});
    let (status, refused) =
        agent.post("/v1/chat/completions", chat(json!({"tools": [{"type": "function", "function": wrong}]}))).await;
    assert_eq!(
        (status.as_u16(), &refused["error"]["param"]),
        (400, &json!("tools[0].function.parameters")),
        "{refused}"
    );
}

#[tokio::test]
async fn of_allowed_tools_no_other_is_called() {
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
    let says = r#"Well.<tool_call>{"name": "f", "arguments": {"m": true}}</tool_call>"#;
    for (mode, said) in [("auto", json!("Well.")), ("required", Value::Null)] {
        let allowed = json!({"mode": mode, "tools": [{"type": "function", "function": {"name": "g"}}]});
        let choice = json!({"type": "allowed_tools", "allowed_tools": allowed});
        let fields = json!({"tools": [tool("f"), tool("g")], "tool_choice": choice, "parallel_tool_calls": false});
        let (message, _) = constrained(says, CALLS, fields).await;
        let call = &message["tool_calls"][0]["function"];
        assert_eq!((&message["content"], &call["name"]), (&said, &json!("g")), "{mode}: {message}");
    }
    let agent = Agent::with_template(SimScript { completion: says.into(), ..SimScript::default() }, CALLS);
    let flat = |name: &str| json!({"type": "function", "name": name});
    let ask = |choice: Value| json!({"input": "x", "tools": [flat("f"), flat("g")], "tool_choice": choice});
    let choice = json!({"type": "allowed_tools", "mode": "auto", "tools": [flat("g")]});
    let (status, response) = agent.post("/v1/responses", ask(choice.clone())).await;
    assert_eq!((status.as_u16(), &response["tool_choice"]), (200, &choice), "{response}");
    let names: Vec<&Value> = response["output"].as_array().unwrap().iter().map(|item| &item["name"]).collect();
    assert_eq!(names, [&Value::Null, &json!("g")], "{response}");
    for (wrong, param) in [
        (json!({"type": "allowed_tools", "mode": "any", "tools": [flat("g")]}), "tool_choice.mode"),
        (json!({"type": "allowed_tools", "tools": []}), "tool_choice.tools"),
        (json!({"type": "allowed_tools", "tools": [{"type": "file_search"}]}), "tool_choice.tools[0]"),
        (json!({"type": "allowed_tools", "tools": [flat("h")]}), "tool_choice"),
        (json!({"type": "web_search"}), "tool_choice"),
    ] {
        let (status, refused) = agent.post("/v1/responses", ask(wrong)).await;
        assert_eq!((status.as_u16(), &refused["error"]["param"]), (400, &json!(param)), "{refused}");
    }
}

#[tokio::test]
async fn a_structure_holds_behind_the_thoughts() {
    let fields = json!({"guided_choice": ["yes", "no"]});
    let (message, _) = constrained("<think>hm</think>yes", THINKS, fields).await;
    assert_eq!((&message["reasoning"], &message["content"]), (&json!("hm"), &json!("yes")));
}

#[tokio::test]
async fn a_tool_whose_schema_cannot_be_followed_is_named() {
    let agent = Agent::with_template(SimScript::default(), THINKS);
    let tool = |name: &str, parameters: Value| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    let wrong = json!({"type": "object", "properties": {"x": {"type": "y"}}});
    let tools = json!([tool("f", json!({"type": "object"})), tool("g", wrong)]);
    let fields = chat(json!({"tools": tools, "tool_choice": "required"}));
    let (status, answer) = agent.post("/v1/chat/completions", fields).await;
    assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!("tools[1].function.parameters")), "{answer}");
    let (_, metrics) = (agent.get("/healthz").await, agent.send("GET", "/metrics", "").await);
    let text = metrics.into_body().collect().await.unwrap().to_bytes();
    assert!(String::from_utf8_lossy(&text).contains("stoker_grammars_total{outcome=\"refused\"} 1"));
}
