//! What is refused, in which words, and what it costs.

use axum::body::Body;
use axum::http::Request;
use axum::http::StatusCode;
use serde_json::Value;
use serde_json::json;
use stoker_agent::http::access::{ApiKeys, guarded};
use stoker_engine::EngineLimits;
use stoker_engine::exec::sim::SimScript;
use tower::ServiceExt;

use crate::{agent::*, answers::CALLS};

/// A body that says how long it is and must not be asked for.
struct Unread(u64);

impl hyper::body::Body for Unread {
    type Data = bytes::Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Self::Data>, Self::Error>>> {
        panic!("the body is asked for")
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        hyper::body::SizeHint::with_exact(self.0)
    }
}

async fn answer_to_unread(agent: &Agent, bytes: u64) -> (StatusCode, Value) {
    let request = Request::post("/v1/completions").header("expect", "100-continue").body(Body::new(Unread(bytes)));
    json_of(agent.router.clone().oneshot(request.unwrap()).await.unwrap()).await
}

#[tokio::test]
async fn every_refusal_names_its_parameter_in_openais_words_and_the_next_request_works() {
    let agent = Agent::new();
    let said = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let message = |message: Value| json!({"messages": [message]});
    let function = json!({"type": "function", "function": {"name": "f"}});
    for (fields, status, param, code) in [
        (json!({"guided_xml": {}}), 400, "guided_xml", "unknown_parameter"),
        (json!({"temprature": 1}), 400, "temprature", "unknown_parameter"),
        (json!({"stream_options": {"x": 1}}), 400, "stream_options.x", "unknown_parameter"),
        (json!({"model": "gpt-4"}), 404, "model", "model_not_found"),
        (json!({"temperature": "hot"}), 400, "temperature", "invalid_type"),
        (json!({"temperature": 2.5}), 400, "temperature", "decimal_above_max_value"),
        (json!({"presence_penalty": -3}), 400, "presence_penalty", "decimal_below_min_value"),
        (json!({"n": 0}), 400, "n", "integer_below_min_value"),
        (json!({"max_tokens": -1}), 400, "max_tokens", "integer_below_min_value"),
        (json!({"max_tokens": 1e30}), 400, "max_tokens", "integer_above_max_value"),
        (json!({"max_tokens": "10"}), 400, "max_tokens", "invalid_type"),
        (json!({"max_tokens": 3000}), 400, "max_tokens", "invalid_value"),
        (json!({"logit_bias": {"999": 1}}), 400, "logit_bias.999", "invalid_value"),
        (json!({"top_logprobs": 2}), 400, "top_logprobs", "invalid_value"),
        (json!({"response_format": {"type": "xml"}}), 400, "response_format.type", "unsupported_parameter"),
        (json!({"guided_json": {"type": "objec"}}), 400, "guided_json", "invalid_value"),
        (json!({"guided_choice": (0..10_000).collect::<Vec<_>>()}), 400, "guided_choice[0]", "invalid_type"),
        (
            json!({"structured_outputs": {"choice": (0..10_000).map(|n| n.to_string()).collect::<Vec<_>>()}}),
            400,
            "structured_outputs.choice",
            "invalid_value",
        ),
        (json!({"guided_regex": "(unclosed"}), 400, "guided_regex", "invalid_value"),
        (json!({"guided_grammar": "start: missing"}), 400, "guided_grammar", "invalid_value"),
        (json!({"tools": [function]}), 400, "tools", "unsupported_parameter"),
        (json!({"tools": [{"type": "retrieval"}]}), 400, "tools[0]", "invalid_value"),
        (json!({"tool_choice": "required"}), 400, "tool_choice", "invalid_value"),
        (json!({"tool_choice": function}), 400, "tool_choice", "invalid_value"),
        (json!({"tool_choice": 1}), 400, "tool_choice", "invalid_type"),
        (json!({"messages": null}), 400, "messages", "missing_required_parameter"),
        (json!({"messages": []}), 400, "messages", "empty_array"),
        (json!({"messages": "hi"}), 400, "messages", "invalid_type"),
        (said(json!([])), 400, "messages[0].content", "empty_array"),
        (said(json!("x".repeat(3000))), 400, "messages", "context_length_exceeded"),
        (message(json!({"content": "x"})), 400, "messages[0].role", "missing_required_parameter"),
        (message(json!({"role": "no role"})), 400, "messages[0].role", "invalid_value"),
        (
            message(json!({"role": "tool", "content": "x"})),
            400,
            "messages[0].tool_call_id",
            "missing_required_parameter",
        ),
    ] {
        let (got, answer) = agent.post("/v1/chat/completions", chat(fields)).await;
        let error = &answer["error"];
        assert_eq!((got.as_u16(), &error["param"], &error["code"]), (status, &json!(param), &json!(code)), "{answer}");
        assert!(error["message"].is_string() && error["type"] == "invalid_request_error");
    }
    for (field, value) in
        [("prompt_logprobs", json!(1)), ("best_of", json!(2)), ("suffix", json!("x")), ("logprobs", json!(21))]
    {
        let (status, answer) = agent.post("/v1/completions", json!({"prompt": "x", field: value})).await;
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!(field)), "{answer}");
    }
    assert_eq!(agent.post("/v1/chat/completions", chat(json!({}))).await.0, 200);
}

#[tokio::test]
async fn ten_thousand_stop_strings_are_refused_with_the_limit_and_the_way_out() {
    let agent = Agent::new();
    let many: Vec<String> = (0..10_000).map(|n| format!("stop {n}")).collect();
    for (path, fields) in [
        ("/v1/chat/completions", chat(json!({"stop": many}))),
        ("/v1/completions", json!({"prompt": "x", "stop": many})),
    ] {
        let (status, answer) = agent.post(path, fields).await;
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!("stop")), "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        for words in ["10000 strings", "more than 16", "`stop_token_ids`, which takes 128"] {
            assert!(message.contains(words), "{message}");
        }
        assert!(message.len() < 300, "what was sent is not sent back");
    }
    // The same refusal by the names of the other APIs.
    let message = json!({"model": "sim", "max_tokens": 5, "stop_sequences": many, "messages": [{"role": "user", "content": "x"}]});
    let (status, answer) = agent.post("/v1/messages", message).await;
    assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!("stop_sequences")), "{answer}");
    // Sixteen are taken, and strings beyond the size of a body are not read.
    assert_eq!(agent.post("/v1/completions", json!({"prompt": "x", "stop": many[..16]})).await.0, 200);
    let large: Vec<String> = many.iter().map(|stop| stop.repeat(100)).collect();
    assert_eq!(agent.post("/v1/completions", json!({"prompt": "x", "stop": large})).await.0, 413);
}

#[tokio::test]
async fn a_request_that_has_not_begun_by_its_deadline_ends_by_that_name_and_is_counted() {
    let agent = Agent::slow(EngineLimits { max_num_seqs: Some(1), ..EngineLimits::default() });
    let mut first = agent.open_stream().await;
    for (path, extra) in [
        ("/v1/chat/completions", json!({})),
        ("/v1/chat/completions", json!({"stream": true})),
        ("/v1/chat/completions", json!({"n": 2})),
        ("/v1/completions", json!({"prompt": "x"})),
    ] {
        let mut body = if path.ends_with("chat/completions") { chat(extra) } else { extra };
        body["deadline_ms"] = json!(20);
        let (status, answer) = agent.post(path, body).await;
        let error = &answer["error"];
        assert_eq!((status.as_u16(), &error["code"]), (504, &json!("deadline_exceeded")), "{answer}");
        assert_eq!((&error["param"], &error["type"]), (&json!("deadline_ms"), &json!("server_error")));
    }
    let message = json!([{"role": "user", "content": "x"}]);
    for (path, mut body) in [
        ("/v1/messages", json!({"model": "sim", "max_tokens": 5, "messages": message})),
        ("/v1/responses", json!({"input": "x"})),
    ] {
        body["deadline_ms"] = json!(20);
        let (status, answer) = agent.post(path, body).await;
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (504, &json!("deadline_ms")), "{path}: {answer}");
    }
    assert!(first.next().await.is_some(), "who runs goes on");
    agent.wait_until("nobody waits", |load| load.waiting == 0).await;
    drop(first);
    // In time, and one that needs no waiting.
    let (status, answer) =
        agent.post("/v1/completions", json!({"prompt": "x", "max_tokens": 2, "deadline_ms": 60_000})).await;
    assert_eq!(status, 200, "{answer}");
}

#[tokio::test]
async fn a_form_that_cannot_be_followed_to_its_end_ends_its_request_by_the_limit_and_no_other() {
    let agent = Agent::slow(EngineLimits::default());
    let mut other = agent.open_stream().await;
    // Behind each of the letters all the words may come again.
    let words: Vec<String> =
        ('a'..='p').map(String::from).chain((0..9_000).map(|n| format!("~{n}"))).map(|w| format!("\"{w}\"")).collect();
    let grammar = format!("start: /[xyz]{{3}}!/ w+\nw: {}", words.join(" | "));
    let too_many = "more than 50000 ways for one token";
    for (fields, said) in [
        (json!({"structured_outputs": {"grammar": grammar}}), too_many),
        (json!({"structured_outputs": {"choice": ["xy"]}, "min_tokens": 9}), "lower min_tokens"),
    ] {
        let (status, answer) = agent.post("/v1/chat/completions", chat(fields.clone())).await;
        let error = &answer["error"];
        assert_eq!((status.as_u16(), &error["code"]), (400, &json!("structure_not_followed")), "{answer}");
        assert!(error["message"].as_str().unwrap().contains(said), "{answer}");
        let mut streamed = chat(fields);
        streamed["stream"] = json!(true);
        let body = agent.send("POST", "/v1/chat/completions", &streamed.to_string()).await.into_body();
        let last = events(&Stream { body }.rest().await).pop().unwrap();
        assert_eq!(last["error"]["code"], "structure_not_followed", "{last}");
    }
    assert!(other.next().await.is_some(), "who runs beside it goes on");
}

#[tokio::test]
async fn contradictory_pairs_are_refused_by_one_of_their_names() {
    let agent = Agent::with_template(SimScript::default(), CALLS);
    let function = |name: &str| json!({"type": "function", "function": {"name": name}});
    let format = json!({"type": "json_object"});
    for (fields, param) in [
        (json!({"min_tokens": 9, "max_tokens": 8}), "min_tokens"),
        (json!({"max_tokens": 8, "max_completion_tokens": 9}), "max_tokens"),
        (json!({"response_format": format, "guided_regex": "a"}), "guided_regex"),
        (json!({"structured_outputs": {"regex": "a", "choice": ["a"]}}), "structured_outputs.choice"),
        (json!({"stream": true, "prompt_logprobs": 1}), "prompt_logprobs"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (json!({"logprob_token_ids": [1]}), "logprob_token_ids"),
        (json!({"tools": [function("f")], "tool_choice": function("g")}), "tool_choice"),
        (json!({"parallel_tool_calls": false, "tool_choice": "required"}), "tool_choice"),
        (json!({"tools": [function("f"), function("f")]}), "tools[1].function.name"),
        (json!({"truncation_side": "right"}), "truncation_side"),
        (json!({"allowed_token_ids": []}), "allowed_token_ids"),
        (json!({"documents": [{"text": "x"}]}), "documents"),
        (json!({"min_tokens": 3000}), "min_tokens"),
        (json!({"add_generation_prompt": true, "continue_final_message": true}), "continue_final_message"),
    ] {
        let (status, answer) = agent.post("/v1/chat/completions", chat(fields.clone())).await;
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!(param)), "{fields}: {answer}");
    }
    // Sixteen tokens unless it says otherwise.
    let (_, answer) = agent.post("/v1/completions", json!({"prompt": "x", "min_tokens": 17})).await;
    let said = answer["error"]["message"].as_str().unwrap();
    assert!(answer["error"]["param"] == "min_tokens" && said.contains("at most 16, a larger `max_tokens`"), "{answer}");
    // By the names of the other APIs, in the message too.
    let tool = json!({"name": "f", "input_schema": {"type": "object"}});
    let messages = json!([{"role": "user", "content": "x"}]);
    for (path, body, param) in [
        ("/v1/messages", json!({"max_tokens": 5, "messages": messages, "tools": [tool, tool]}), "tools[1].name"),
        ("/v1/messages", json!({"max_tokens": 5, "messages": messages, "stop_sequences": ["", "x"]}), "stop_sequences"),
        ("/v1/messages/count_tokens", json!({"messages": messages, "max_tokens": 5}), "max_tokens"),
        ("/v1/responses", json!({"input": "x", "text": {"verbosity": "high"}}), "text.verbosity"),
    ] {
        let (status, answer) = agent.post(path, body).await;
        let said = answer["error"]["message"].as_str().unwrap_or_default();
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!(param)), "{answer}");
        assert!(said.contains(&format!("`{param}`")), "{answer}");
    }
    assert_eq!(agent.post("/v1/chat/completions", chat(json!({}))).await.0, 200);
}

#[tokio::test]
async fn what_explodes_or_never_ends_is_refused_or_answered_and_harms_nobody() {
    let agent = Agent::new();
    let nested = (0..100).fold(json!({"type": "string"}), |inner, _| json!({"type": "array", "items": inner}));
    let wide: Vec<Value> = (0..2_000).map(|n| json!({"type": "object", "required": [format!("k{n}")]})).collect();
    for (fields, param) in [
        (json!({"guided_regex": "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"}), "guided_regex"),
        (json!({"guided_regex": "(".repeat(100_000)}), "guided_regex"),
        (json!({"guided_grammar": "start: start"}), "guided_grammar"),
        (json!({"guided_grammar": "start: a\na: b\nb: a"}), "guided_grammar"),
        (json!({"guided_json": {"$ref": "#"}}), "guided_json"),
        (json!({"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}), "guided_json"),
        (json!({"guided_json": {"oneOf": wide}}), "guided_json"),
        (json!({"guided_json": nested}), "guided_json"),
        (json!({"guided_json": {"type": "string", "pattern": "(a{1,9999}){1,9999}"}}), "guided_json"),
    ] {
        let mut body = chat(fields);
        body["max_tokens"] = json!(4);
        let (status, answer) = agent.post("/v1/chat/completions", body).await;
        let said = answer["error"]["message"].as_str().unwrap_or_default();
        println!("{param}: {status} {said}");
        assert!(status == 200 || status == 400 && answer["error"]["param"] == param, "{answer}");
        assert!(said.len() < 1_000, "a refusal is short: {said}");
    }
    assert_eq!(agent.post("/v1/chat/completions", chat(json!({}))).await.0, 200);
}

#[tokio::test]
async fn a_compressed_body_is_told_from_one_that_is_not_json() {
    let agent = Agent::new();
    for (encoding, expected) in [("gzip", 415), ("identity", 200)] {
        let request = Request::post("/v1/chat/completions").header("content-encoding", encoding);
        let request = request.body(Body::from(chat(json!({})).to_string())).unwrap();
        let (status, answer) = json_of(agent.router.clone().oneshot(request).await.unwrap()).await;
        assert_eq!(status, expected, "{answer}");
    }
}

#[tokio::test]
async fn a_full_queue_refuses_with_429_and_a_time_to_retry() {
    let agent = Agent::slow(EngineLimits { max_num_seqs: Some(1), max_waiting: 1, ..EngineLimits::default() });
    let _running = agent.open_stream().await;
    let body = json!({"prompt": "x", "stream": true, "max_tokens": 1000}).to_string();
    let waiting = agent.send_aside("/v1/completions", &body);
    agent.wait_until("one waits", |report| report.waiting == 1).await;
    let refused = agent.send("POST", "/v1/completions", &body).await;
    assert_eq!(refused.status(), 429);
    assert!(refused.headers()["retry-after"].to_str().unwrap().parse::<u32>().unwrap() >= 1);
    waiting.abort();
    // Its place is free once its end is counted, which is a moment after the scheduler let go of it.
    agent.wait_until("a place is free", |report| report.finished == 1).await;
    let next = agent.send_aside("/v1/completions", &body);
    agent.wait_until("it is taken", |report| report.waiting == 1).await;
    next.abort();
}

#[tokio::test]
async fn errors_outside_the_endpoints_have_the_same_body() {
    let agent = Agent::new();
    for (method, path, status) in [
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/nope", 404),
        ("GET", "/v1/models/a/b", 404),
        ("GET", "/v1/models/%ff", 404),
    ] {
        let (got, answer) = json_of(agent.send(method, path, "").await).await;
        assert_eq!(got, status, "{method} {path}");
        assert!(answer["error"]["message"].is_string(), "{answer}");
    }
}

#[tokio::test]
async fn a_client_that_asks_before_it_sends_is_not_invited_to_send_what_is_refused() {
    let (status, answer) = answer_to_unread(&Agent::new(), 100 << 20).await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (413, &json!("body_too_large")));
    let loading = Agent::loading(&EngineLimits::default());
    assert_eq!(answer_to_unread(&loading, 100).await.0, 503, "refused by its head");
}

#[tokio::test]
async fn what_could_run_at_once_takes_no_place_of_those_that_wait() {
    let agent = Agent::with(
        SimScript::default(),
        EngineLimits { max_num_seqs: Some(3), max_waiting: 2, ..EngineLimits::default() },
    );
    let texts = |n: usize| json!({"prompt": vec!["x"; n], "max_tokens": 1});
    let (status, answer) = agent.post("/v1/completions", texts(5)).await;
    assert_eq!(status, 200, "{answer}");
    for (body, param) in [(texts(6), "prompt"), (json!({"prompt": "x", "n": 6}), "n")] {
        let (status, answer) = agent.post("/v1/completions", body).await;
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!(param)), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("the 5 that may run and wait"), "{answer}");
    }
}

#[tokio::test]
async fn a_prompt_far_beyond_the_context_is_refused_by_its_beginning() {
    let agent = Agent::new();
    let text = "x".repeat(7 << 20);
    let message = json!({"messages": [{"role": "user", "content": text}]});
    for (path, body, param) in [
        ("/v1/completions", json!({"prompt": text}), "prompt"),
        ("/v1/completions", json!({"prompt": ["short", text]}), "prompt"),
        ("/v1/chat/completions", message.clone(), "messages"),
        ("/tokenize", message, "messages"),
        ("/v1/embeddings", json!({"input": text}), "input"),
    ] {
        let (status, answer) = agent.post(path, body).await;
        let error = &answer["error"];
        assert_eq!((status.as_u16(), &error["code"]), (400, &json!("context_length_exceeded")), "{answer}");
        assert_eq!(error["param"], param, "{path}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("maximum context length is 2048 tokens"), "{message}");
        assert!(message.contains("contains at least 3687 input tokens"), "one slice was read: {message}");
    }
}

#[tokio::test]
async fn what_no_embedding_can_be_made_of_is_refused_by_name() {
    let agent = Agent::new();
    let texts = json!(vec!["x"; 2049]);
    for (body, param, said) in [
        (json!({}), "input", "is missing"),
        (json!({"input": []}), "input", "at least one token"),
        (json!({"input": ""}), "input", "empty"),
        (json!({"input": ["", "x"]}), "input", "empty"),
        (json!({"input": {"text": "x"}}), "input", "array of strings"),
        (json!({"input": [70_000]}), "input", "outside the vocabulary"),
        (json!({"input": texts}), "input", "at most 2048"),
        (json!({"input": "x", "encoding_format": "int8"}), "encoding_format", "base64"),
        (json!({"input": "x", "dimensions": 0}), "dimensions", "between 1 and"),
        (json!({"input": "x", "dimensions": 2}), "dimensions", "between 1 and 1"),
        (json!({"input": "x", "dimension": 1}), "dimension", "did you mean `dimensions`?"),
        // The simulated device, as several GPUs that share a model.
        (json!({"input": "x", "user": "me"}), "input", "does not compute embeddings"),
    ] {
        let (status, answer) = agent.post("/v1/embeddings", body).await;
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!(param)), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(said), "{said}: {answer}");
    }
    let (status, _) = agent.post("/v1/embeddings", json!({"model": "other", "input": "x"})).await;
    assert_eq!(status, 404);
}

#[tokio::test]
async fn a_name_sent_twice_is_refused() {
    for body in [r#"{"prompt": "a", "prompt": "b"}"#, r#"{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}"#] {
        let (status, answer) = json_of(Agent::new().send("POST", "/v1/completions", body).await).await;
        assert_eq!((status.as_u16(), &answer["error"]["code"]), (400, &json!("duplicate_parameter")), "{answer}");
    }
}

#[tokio::test]
async fn a_role_that_only_the_template_knows_is_taken_where_the_template_prints_it() {
    let said = json!({"messages": [{"role": "critic", "content": "Too long."}]});
    let (status, answer) = Agent::new().post("/v1/chat/completions", said.clone()).await;
    assert_eq!(status, 200, "{answer}");
    let deaf = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}>";
    let (status, answer) = Agent::with_template(SimScript::default(), deaf).post("/v1/chat/completions", said).await;
    assert_eq!((status, &answer["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("messages[0].role")), "{answer}");
    let mark = json!({"messages": [{"role": "<|user|>", "content": "x"}]});
    let (status, answer) = Agent::new().post("/v1/chat/completions", mark).await;
    assert_eq!((status, &answer["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("messages[0].role")), "{answer}");
}

#[tokio::test]
async fn a_prompt_far_too_long_is_refused_before_its_template_is_rendered() {
    let agent = Agent::with_template(SimScript::default(), "{{ raise_exception('it was rendered') }}");
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(10)}, {"role": "user", "content": "y".repeat(1 << 20)}]});
    let (status, answer) = agent.post("/v1/chat/completions", long).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (StatusCode::BAD_REQUEST, &json!("context_length_exceeded")),
        "{answer}"
    );
    assert_eq!(answer["error"]["param"], "messages");
    let (_, answer) = agent.post("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "x"}]})).await;
    assert!(answer["error"]["message"].as_str().unwrap().contains("it was rendered"), "{answer}");
}

#[tokio::test]
async fn a_long_prompt_is_refused_before_other_mistakes_by_its_field_and_what_nobody_reads_is_none() {
    let long = "a\n\u{e9}".repeat(1 << 18);
    let said = |content: Value| json!({"messages": [{"role": "user", "content": content}], "unheard_of": 1});
    for (path, body, param, code) in [
        ("/v1/chat/completions", said(json!(long)), "messages", "context_length_exceeded"),
        ("/v1/chat/completions", said(json!([{"type": "text", "text": long}])), "messages", "context_length_exceeded"),
        ("/v1/chat/completions", said(json!("short")), "unheard_of", "unknown_parameter"),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "x", "annotations": [{"content": long}]}], "unheard_of": 1}),
            "unheard_of",
            "unknown_parameter",
        ),
        ("/v1/completions", json!({"prompt": long, "unheard_of": 1}), "prompt", "context_length_exceeded"),
        ("/v1/completions", json!({"prompt": ["x", long], "unheard_of": 1}), "prompt", "context_length_exceeded"),
        // Each has the context for itself.
        ("/v1/completions", json!({"prompt": vec!["x"; 1 << 16], "unheard_of": 1}), "unheard_of", "unknown_parameter"),
        ("/v1/embeddings", json!({"input": [long], "unheard_of": 1}), "input", "context_length_exceeded"),
        ("/tokenize", json!({"messages": [{"role": "user", "content": long}]}), "messages", "context_length_exceeded"),
    ] {
        let (status, answer) = Agent::new().post(path, body).await;
        let error = &answer["error"];
        assert_eq!(
            (status.as_u16(), &error["param"], &error["code"]),
            (400, &json!(param), &json!(code)),
            "{path} {answer}"
        );
    }
}

#[tokio::test]
async fn with_keys_only_who_has_one_may_ask_also_below_the_root() {
    let keys = ApiKeys::parse("secret\n").unwrap();
    let router = guarded(Agent::new().router.clone(), keys, Some("/llm"));
    for (path, key, expected) in [
        ("/v1/models", None, 401),
        ("/v1/models", Some("secret"), 200),
        ("/v1/models", Some("wrong"), 401),
        ("/llm/v1/models", None, 401),
        ("/llm/v1/models", Some("secret"), 200),
        ("/unknown", None, 401),
        ("/readyz", None, 200),
        ("/metrics", None, 200),
    ] {
        let request =
            Request::get(path).header("authorization", key.map_or(String::new(), |key| format!("Bearer {key}")));
        let response = router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
        assert_eq!(response.status(), expected, "{path} {key:?}");
    }
}
