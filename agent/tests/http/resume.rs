//! Answers that another replica goes on with: wherever a stream is cut, what one agent told and what another one adds is the stream
//! that nobody cut.

use axum::{body::Body, http::Request};
use serde_json::{Value, json};
use stoker_engine::{EngineLimits, exec::sim::SimScript};

use tower::ServiceExt;

use crate::{agent::*, named_events::*};

const DRAWN: &str = "000000000000002a-0123456789abcdef0123456789abcdef-1700000000";

/// A piece of a stream and the mark behind it.
#[derive(Clone, Debug, PartialEq)]
struct Piece {
    data: String,
    mark: String,
}

fn pieces(stream: &str) -> Vec<Piece> {
    let (mut pieces, mut data) = (Vec::new(), String::new());
    for line in stream.split_inclusive('\n') {
        match line.strip_prefix(": stoker") {
            Some(mark) => pieces.push(Piece { data: std::mem::take(&mut data), mark: mark.trim().to_owned() }),
            None => data.push_str(line),
        }
    }
    assert_eq!(data, "", "what is said has a mark behind it");
    pieces
}

/// What a gateway keeps of these pieces, as it tells it; `None` before the answer is opened.
fn told(pieces: &[Piece], vocabulary: &str) -> Option<String> {
    let (mut choices, mut is_opened) = (Vec::new(), false);
    for piece in pieces {
        let words: Vec<&str> = piece.mark.split(' ').collect();
        let [index, rest @ ..] = words.as_slice() else { continue };
        is_opened |= *index == "opened";
        let Ok(index) = index.parse::<usize>() else { continue };
        while choices.len() <= index {
            choices.push(json!({"tokens": [], "cached": 0, "ended": false}));
        }
        match rest {
            ["end"] => choices[index]["ended"] = true.into(),
            [cached, tokens @ ..] => {
                choices[index]["cached"] = cached.parse::<u32>().unwrap().into();
                let tokens = tokens.iter().map(|token| Value::from(token.parse::<u32>().unwrap()));
                choices[index]["tokens"].as_array_mut().unwrap().extend(tokens);
            }
            [] => panic!("{piece:?}"),
        }
    }
    is_opened.then(|| json!({"vocabulary": vocabulary, "choices": choices}).to_string())
}

/// The status, what names the model, and the body.
async fn ask(agent: &Agent, path: &str, body: &Value, told: Option<&str>) -> (u16, String, String) {
    let request = Request::post(path).header("x-stoker-drawn", DRAWN);
    let request = match told {
        Some(told) => request.header("x-stoker-resume", told.len()),
        None => request,
    };
    let body = format!("{}{body}", told.unwrap_or_default());
    let response = agent.router.clone().oneshot(request.body(Body::from(body)).unwrap()).await.unwrap();
    let model = response.headers().get("x-stoker-model").map(|model| model.to_str().unwrap().to_owned());
    let status = response.status().as_u16();
    (status, model.unwrap_or_default(), Stream { body: response.into_body() }.rest().await)
}

/// Frames in an order that does not depend on which of several choices was faster. When an answer was complete it says by the clock.
fn frames(text: &str, is_ordered: bool) -> Vec<String> {
    let timeless = |frame: &str| match frame.split_once("\"completed_at\":") {
        Some((before, behind)) => before.to_owned() + behind.trim_start_matches(|c: char| c.is_ascii_digit()),
        None => frame.to_owned(),
    };
    let mut frames: Vec<String> = text.split_terminator("\n\n").map(timeless).collect();
    if !is_ordered {
        frames.sort_unstable();
    }
    frames
}

/// Cuts a stream behind each of its pieces.
async fn check(name: &str, agents: [&Agent; 2], path: &str, body: &Value) {
    let (status, model, stream) = ask(agents[0], path, body, None).await;
    assert_eq!(status, 200, "{name}: {stream}");
    let (vocabulary, bits) = model.split_once('-').unwrap();
    assert_eq!((vocabulary.len(), bits), (16, ""), "{name}: a simulated device promises no bits");
    let pieces = pieces(&stream);
    let whole: String = pieces.iter().map(|piece| piece.data.as_str()).collect();
    assert_eq!(pieces.last().unwrap().mark, "done", "{name}");
    assert!(pieces.len() > 4, "{name}: {stream}");
    let is_ordered = body["n"].is_null();
    for cut in 1..pieces.len() {
        let (before, _) = pieces.split_at(cut);
        let told = told(before, vocabulary).unwrap();
        let (status, again, rest) = ask(agents[1], path, body, Some(&told)).await;
        assert_eq!((status, again.as_str()), (200, model.as_str()), "{name} cut at {cut}: {rest}");
        let both: String = before.iter().cloned().chain(self::pieces(&rest)).map(|piece| piece.data).collect();
        assert_eq!(frames(&both, is_ordered), frames(&whole, is_ordered), "{name} cut at {cut}, told {told}");
    }
}

fn agents(completion: &str, template: &str) -> [Agent; 2] {
    [0, 1].map(|_| Agent::with_template(SimScript { completion: completion.into(), ..SimScript::default() }, template))
}

#[tokio::test]
async fn wherever_a_stream_is_cut_another_replica_adds_exactly_the_rest() {
    let streamed = |fields: Value| {
        let mut body = chat(fields);
        body["stream"] = true.into();
        body
    };
    let counted = json!({"include_usage": true, "continuous_usage_stats": true});
    let text = "Grüße, 世界! All is well.";
    for (name, fields) in [
        ("text", json!({})),
        ("usage", json!({"stream_options": {"include_usage": true}})),
        ("counts all along", json!({"stream_options": counted})),
        ("a stop string", json!({"stop": ["is"]})),
        ("a stop string that is not whole", json!({"stop": ["well.."]})),
        ("a length", json!({"max_tokens": 9})),
        ("log-probabilities", json!({"logprobs": true, "top_logprobs": 2})),
        ("tokens", json!({"return_token_ids": true})),
        ("two", json!({"n": 2})),
        ("three that end early", json!({"n": 3, "max_tokens": 5})),
        ("a minimum", json!({"min_tokens": 30, "max_tokens": 40})),
        ("choices", json!({"structured_outputs": {"choice": ["Grüße, 世界!", "no"]}})),
    ] {
        let [first, second] = agents(text, TEMPLATE);
        check(name, [&first, &second], "/v1/chat/completions", &streamed(fields)).await;
    }
    for (name, fields) in [
        ("a text", json!({})),
        ("a text with log-probabilities", json!({"logprobs": 2})),
        ("an echo", json!({"echo": true, "stream_options": counted})),
        ("two prompts", json!({"prompt": ["hi", "ho"], "n": 2})),
    ] {
        let [first, second] = agents(text, TEMPLATE);
        let mut body = json!({"model": "sim", "prompt": "hi", "max_tokens": 25, "stream": true});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        check(name, [&first, &second], "/v1/completions", &body).await;
    }
}

#[tokio::test]
async fn thoughts_and_calls_go_on_in_the_middle_of_a_word() {
    let thinks = "<think>\nA <tool_call> may help.\n</think>\n\nSo:<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"y z\"}}</tool_call>";
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let [first, second] = agents(thinks, THINKS);
    let body = chat(json!({"tools": tools, "stream": true, "stream_options": {"include_usage": true}}));
    check("chat", [&first, &second], "/v1/chat/completions", &body).await;

    let [first, second] = agents(CALLING, TOOLS_TEMPLATE);
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    let messages = json!([{"role": "user", "content": "hi"}]);
    let body = json!({"model": "sim", "max_tokens": 99, "messages": messages, "tools": tools, "stream": true});
    check("messages", [&first, &second], "/v1/messages", &body).await;

    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}}]);
    let body = json!({"input": "hi", "tools": tools, "stream": true, "store": false});
    check("responses", [&first, &second], "/v1/responses", &body).await;
}

#[tokio::test]
async fn an_engine_that_stops_is_told_from_a_replica_that_leaves() {
    let script = SimScript { fail_at_step: Some(3), ..SimScript::default() };
    let agent = Agent::with(script, EngineLimits::default());
    let body = json!({"prompt": "hi", "stream": true, "max_tokens": 1000}).to_string();
    let marked =
        Request::post("/v1/completions").header("x-stoker-drawn", DRAWN).body(Body::from(body.clone())).unwrap();
    let stream = Stream { body: agent.router.clone().oneshot(marked).await.unwrap().into_body() };
    let told = pieces(&stream.rest().await);
    let last = told.last().unwrap();
    assert_eq!((last.mark.as_str(), last.data.as_str()), ("broken", ""), "{told:?}");
    // Until the process ends, who comes is told that nothing was taken.
    let (status, refused) = json_of(agent.send("POST", "/v1/completions", &body).await).await;
    assert_eq!((status.as_u16(), &refused["error"]["code"]), (503, &json!("engine_stopped")), "{refused}");
}

#[tokio::test]
async fn a_replica_that_ends_says_that_another_one_may_go_on() {
    let agent = Agent::slow(EngineLimits::default());
    let body = json!({"prompt": "hi", "stream": true, "max_tokens": 1000});
    let request = Request::post("/v1/completions").header("x-stoker-drawn", DRAWN);
    let request = request.body(Body::from(body.to_string())).unwrap();
    let mut stream = Stream { body: agent.router.clone().oneshot(request).await.unwrap().into_body() };
    let first = stream.next().await.unwrap();
    agent.leave(0, 0);
    agent.replica.tick();
    let rest = pieces(&(first + &stream.rest().await));
    let last = rest.last().unwrap();
    assert!(last.mark == "elsewhere" && last.data.contains("replica_ended"), "{last:?}");

    // Of a client that asked for no marks, nothing is heard of them.
    let agent = Agent::new();
    let (_, plain) = json_of(agent.send("POST", "/v1/completions", &json!({"prompt": "hi"}).to_string()).await).await;
    assert_eq!(plain["choices"][0]["text"], "All is well.");
    let streamed = json!({"prompt": "hi", "stream": true}).to_string();
    let response = agent.send("POST", "/v1/completions", &streamed).await;
    assert!(!response.headers().contains_key("x-stoker-model"));
    assert!(!Stream { body: response.into_body() }.rest().await.contains(": stoker"));
}

#[tokio::test]
async fn what_was_told_by_another_model_is_not_gone_on_with() {
    let [first, second] = agents("All is well.", TEMPLATE);
    let body = json!({"model": "sim", "prompt": "hi", "stream": true});
    let (_, model, stream) = ask(&first, "/v1/completions", &body, None).await;
    let vocabulary = model.split_once('-').unwrap().0;
    let pieces = pieces(&stream);
    for (told, status, code) in [
        (told(&pieces[..3], "0123").unwrap(), 409, "resume_mismatch"),
        ("{}".to_owned(), 400, "malformed_passage"),
        (
            r#"{"vocabulary":"V","choices":[{"tokens":[-1],"cached":0,"ended":false}]}"#.replace('V', vocabulary),
            400,
            "malformed_passage",
        ),
        (
            r#"{"vocabulary":"V","choices":[{"tokens":[99999999],"cached":0,"ended":false}]}"#.replace('V', vocabulary),
            400,
            "invalid_value",
        ),
    ] {
        let (got, _, answer) = ask(&second, "/v1/completions", &body, Some(&told)).await;
        let error: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!((got, &error["error"]["code"]), (status, &json!(code)), "{told}: {answer}");
    }
    // All that may be told is told: nothing is left to compute, and the answer ends.
    let all = told(&pieces[..pieces.len() - 1], vocabulary).unwrap();
    let (_, _, rest) = ask(&second, "/v1/completions", &body, Some(&all)).await;
    assert!(rest.ends_with("data: [DONE]\n\n: stoker done\n"), "{rest}");
}
