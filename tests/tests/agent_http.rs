//! A real agent process that serves ember: every endpoint, bad input, clients that leave, drains and signals.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result};
use futures::{StreamExt, future::join_all};
use reqwest::{Client, Response, StatusCode};
use serde_json::{Value, json};
use stoker_cluster::Keeper;
use stoker_crds::{
    contract::{AgentPhase, DrainSettings},
    history::LoadHistory,
    intent::{INTENT_PATH, Order, Want},
};
use stoker_replica::history::is_believable;
use stoker_tests::{
    agent::{self, AgentProcess},
    agent_pod::{AgentPod as Pod, public_key, signature},
    cluster::wait_for,
};

/// A completion that lasts: more tokens than any test waits for.
fn long_stream() -> Value {
    json!({"prompt": "Once upon a time", "stream": true, "ignore_eos": true, "max_tokens": 1900, "seed": 1})
}

async fn post(agent: &AgentProcess, path: &str, body: &Value) -> Result<(StatusCode, Value)> {
    let response = Client::new().post(agent.url(path)).json(body).send().await?;
    Ok((response.status(), response.json().await?))
}

async fn get(agent: &AgentProcess, path: &str) -> Result<(StatusCode, String)> {
    let response = reqwest::get(agent.url(path)).await?;
    Ok((response.status(), response.text().await?))
}

/// Opens a stream and waits for its first token.
async fn open_stream(agent: &AgentProcess, body: &Value) -> Result<Response> {
    let mut response = Client::new().post(agent.url("/v1/completions")).json(body).send().await?;
    assert_eq!(response.status(), 200);
    response.chunk().await?;
    Ok(response)
}

async fn rest_of(response: Response) -> Result<String> {
    let mut text = Vec::new();
    let mut chunks = response.bytes_stream();
    while let Some(chunk) = chunks.next().await {
        text.extend_from_slice(&chunk?);
    }
    Ok(String::from_utf8(text)?)
}

fn chat(content: &str, max_tokens: u32) -> Value {
    json!({"model": "ember", "temperature": 0, "max_tokens": max_tokens,
           "messages": [{"role": "user", "content": content}]})
}

#[tokio::test]
async fn every_endpoint_answers() -> Result<()> {
    let agent = AgentProcess::ready(&[]).await?;
    for path in ["/healthz", "/readyz", "/v1/models", "/v1/models/ember", "/metrics"] {
        assert_eq!(get(&agent, path).await?.0, 200, "{path}");
    }
    for path in ["/v1/load", "/v1/history", "/v1/intent", "/v1/drain"] {
        assert_eq!(get(&agent, path).await?.0, 404, "{path} is not for clients");
    }
    let told: LoadHistory = reqwest::get(agent.admin_url("/v1/history")).await?.json().await?;
    let load = agent.load().await?;
    assert!(is_believable(&told, &load.start_id) && !told.fine.is_empty(), "{told:?}");
    let (status, answer) = post(&agent, "/v1/chat/completions", &chat("What is 12 + 30?", 20)).await?;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["choices"][0]["message"]["content"], "42");

    let (_, tokenized) =
        post(&agent, "/tokenize", &json!({"prompt": "Grüße, 世界!", "add_special_tokens": false})).await?;
    assert_eq!(
        (&tokenized["max_model_len"], tokenized["tokens"].as_array().map(Vec::len)),
        (&json!(2048), tokenized["count"].as_u64().map(|n| n as usize))
    );
    let (_, text) = post(&agent, "/detokenize", &json!({"tokens": tokenized["tokens"]})).await?;
    assert_eq!(text["prompt"], "Grüße, 世界!");

    let metrics = get(&agent, "/metrics").await?.1;
    for family in [
        "vllm:num_requests_running{engine=\"0\",model_name=\"ember\"} 0",
        "vllm:request_success_total{engine=\"0\",finished_reason=\"stop\",model_name=\"ember\"} 1",
        "stoker_time_to_first_token_seconds_count 1",
    ] {
        assert!(metrics.contains(family), "{family} is not in\n{metrics}");
    }
    Ok(())
}

/// Answers of the model's own writing, to several requests at once.
async fn written_by(agent: &AgentProcess) -> Result<Vec<String>> {
    let questions =
        ["What is 12 + 30?", "What is the capital of France?", "What is the opposite of hot?", "Who are you?"];
    let asked = questions.map(|question| async move {
        let (status, answer) = post(agent, "/v1/chat/completions", &chat(question, 40)).await?;
        assert_eq!(status, 200, "{answer}");
        Ok(answer["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned())
    });
    join_all(asked).await.into_iter().collect()
}

#[tokio::test]
async fn answers_say_how_long_they_took_and_name_tokens_by_id_where_the_agent_was_told_to() -> Result<()> {
    let agent = AgentProcess::ready(&["--per-request-metrics", "--return-tokens-as-token-ids"]).await?;
    let mut ask = chat("Count to five.", 8);
    ask["logprobs"] = json!(true);
    let (status, whole) = post(&agent, "/v1/chat/completions", &ask).await?;
    assert_eq!(status, StatusCode::OK, "{whole}");
    let token = whole["choices"][0]["logprobs"]["content"][0]["token"].as_str();
    assert!(token.is_some_and(|token| token.starts_with("token_id:")), "{whole}");
    let of = |answer: &Value, name: &str| answer["metrics"][name].as_f64();
    let first = of(&whole, "time_to_first_token_ms").context("no metrics")?;
    assert!(of(&whole, "queue_time_ms").is_some_and(|queued| (0.0..=first).contains(&queued)), "{whole}");
    assert!(
        of(&whole, "mean_itl_ms").is_some_and(|itl| itl > 0.0) && of(&whole, "tokens_per_second") > Some(0.0),
        "{whole}"
    );

    ask["return_tokens_as_token_ids"] = json!(false);
    ask["stream"] = json!(true);
    ask["stream_options"] = json!({"include_usage": true});
    let response = Client::new().post(agent.url("/v1/chat/completions")).json(&ask).send().await?;
    let stream = rest_of(response).await?;
    assert!(!stream.contains("token_id:"), "the request says otherwise: {stream}");
    let timed: Vec<&str> = stream.lines().filter(|line| line.contains("\"metrics\":{")).collect();
    assert!(timed.len() == 1 && timed[0].contains("\"usage\":{"), "beside the counts at the end, once: {stream}");
    Ok(())
}

#[tokio::test]
async fn ranks_and_stages_that_share_the_model_answer_as_one_does() -> Result<()> {
    let agent = |n_ranks, n_stages| async move {
        let shared = ["--tensor-parallel", n_ranks, "--pipeline-parallel", n_stages];
        AgentProcess::ready(&[&["--device", "cpu", "--threads", "2"][..], &shared].concat()).await
    };
    let one = agent("1", "1").await?;
    let answers = written_by(&one).await?;
    assert_eq!(answers[0], "42");
    assert!(answers.iter().all(|answer| !answer.is_empty()), "{answers:?}");
    for (n_ranks, n_stages) in [("2", "1"), ("1", "3"), ("2", "2")] {
        let several = agent(n_ranks, n_stages).await?;
        assert_eq!(written_by(&several).await?, answers, "{n_ranks} ranks, {n_stages} stages");
    }
    Ok(())
}

#[test]
fn ranks_that_do_not_divide_the_model_end_the_agent_with_the_flag_and_the_heads() -> Result<()> {
    let keeper = Keeper::start()?;
    let mut command = keeper.command(&agent::binary()?)?;
    let output =
        command.args(["--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--tensor-parallel", "3"]).output()?;
    let said = String::from_utf8(output.stderr)?;
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("with --tensor-parallel 3: ") && said.contains("3 ranks do not divide its 4 heads"),
        "{said}"
    );
    Ok(())
}

#[tokio::test]
async fn bad_input_is_a_clear_4xx_and_the_next_request_works() -> Result<()> {
    let agent = AgentProcess::ready(&[]).await?;
    let url = agent.url("/v1/chat/completions");
    let long_prompt = chat(&"word ".repeat(5000), 10).to_string();
    let cases: [(&str, Vec<u8>, u16, &str); 6] = [
        ("10 MB", vec![b'a'; 10_000_000], 413, "the limit is 8388608"),
        ("not UTF-8", b"{\"model\": \"\xff\"}".to_vec(), 400, "not UTF-8 at byte 11"),
        ("not JSON", b"{\"model\":".to_vec(), 400, "EOF while parsing"),
        ("unknown field", chat_with("guided_xml", &json!({})), 400, "guided_xml"),
        ("wrong type", chat_with("messages", &json!([{"role": "user", "content": 7}])), 400, "messages[0].content"),
        ("too long", long_prompt.into_bytes(), 400, "maximum context length is 2048 tokens"),
    ];
    for (name, body, status, reason) in cases {
        let response = Client::new().post(&url).body(body).send().await?;
        let got = response.status();
        let answer: Value = response.json().await?;
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(got == status && message.contains(reason), "{name}: {got} {answer}");
        assert_eq!(post(&agent, "/v1/chat/completions", &chat("Hello!", 4)).await?.0, 200, "after {name}");
    }
    Ok(())
}

fn chat_with(field: &str, value: &Value) -> Vec<u8> {
    let mut body = chat("Hello!", 4);
    body[field] = value.clone();
    body.to_string().into_bytes()
}

#[tokio::test]
async fn memory_comes_back_after_a_storm_of_long_prompts() -> Result<()> {
    let agent = AgentProcess::ready(&[]).await?;
    let of = |text: &str| json!({"messages": [{"role": "user", "content": text}], "max_tokens": 4});
    post(&agent, "/v1/chat/completions", &of("Hello!")).await?;
    let before = agent.resident_bytes()?;
    // Just below 8 MiB, the largest body.
    let long = of(&"The quick brown fox. ".repeat(399_000));
    for answer in join_all((0..8).map(|_| post(&agent, "/v1/chat/completions", &long))).await {
        let (status, answer) = answer?;
        assert_eq!((status, &answer["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("context_length_exceeded")));
    }
    let is_back = || agent.resident_bytes().is_ok_and(|now| now < before + (20 << 20));
    wait_for("the memory of long prompts", || is_back().then_some(()));
    Ok(())
}

#[tokio::test]
async fn a_client_that_goes_away_frees_its_blocks() -> Result<()> {
    let agent = AgentProcess::ready(&[]).await?;
    let stream = open_stream(&agent, &long_stream()).await?;
    agent.wait_until("running", |load| load.running == 1 && load.referenced_blocks > 0).await?;
    drop(stream);
    let load = agent.wait_until("idle", |load| load.running == 0 && load.referenced_blocks == 0).await?;
    assert_eq!(load.free_blocks + load.cached_blocks, load.total_blocks);

    // The same without a stream: the client hangs up before the whole answer is there.
    let mut body = long_stream();
    body["stream"] = json!(false);
    let request = Client::new().post(agent.url("/v1/completions")).json(&body).timeout(Duration::from_millis(300));
    assert!(request.send().await.is_err_and(|error| error.is_timeout()));
    agent.wait_until("idle again", |load| load.running == 0 && load.referenced_blocks == 0).await?;
    Ok(())
}

#[tokio::test]
async fn sigterm_finishes_the_open_stream_then_exits_with_0() -> Result<()> {
    let mut agent = AgentProcess::ready(&[]).await?;
    let mut body = long_stream();
    body["max_tokens"] = json!(400);
    let stream = open_stream(&agent, &body).await?;
    agent.terminate()?;
    agent.wait_until("draining", |load| load.phase == AgentPhase::Draining).await?;
    let refused = Client::new().post(agent.url("/v1/completions")).json(&json!({"prompt": "x"})).send().await?;
    assert_eq!(refused.status(), 503);
    assert!(refused.headers().contains_key("retry-after"));

    let text = rest_of(stream).await?;
    assert!(text.contains("\"finish_reason\":\"length\"") && text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(agent.ended().await?.code(), Some(0), "{}", agent.log());
    Ok(())
}

#[tokio::test]
async fn the_drain_deadline_ends_a_stream_with_an_error_and_the_process_still_exits_with_0() -> Result<()> {
    let mut agent = AgentProcess::ready(&["--drain-deadline-seconds", "0"]).await?;
    let stream = open_stream(&agent, &long_stream()).await?;
    agent.terminate()?;
    let text = rest_of(stream).await?;
    assert!(text.contains("data: {\"error\":") && text.contains("drain deadline"), "{text}");
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(agent.ended().await?.code(), Some(0));
    Ok(())
}

#[test]
fn an_agent_whose_log_nobody_reads_any_more_serves_and_drains() -> Result<()> {
    let keeper = Keeper::start()?;
    let mut agent = keeper.command(&agent::binary()?)?;
    agent.args(["--host", "127.0.0.1", "--port", "0"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut agent = agent.spawn()?;
    drop(agent.stdout.take());
    let mut log = BufReader::new(agent.stderr.take().unwrap()).lines();
    assert!(log.any(|line| line.is_ok_and(|line| line.contains("\"to\":\"Ready\""))), "it serves without a stdout");
    drop(log);
    assert!(Command::new("kill").arg(agent.id().to_string()).status()?.success());
    let ended = wait_for("the agent drained", || agent.try_wait().unwrap());
    assert_eq!(ended.code(), Some(0));
    Ok(())
}

#[tokio::test]
async fn a_second_signal_exits_at_once() -> Result<()> {
    let mut agent = AgentProcess::ready(&[]).await?;
    let _stream = open_stream(&agent, &long_stream()).await?;
    agent.terminate()?;
    agent.wait_until("draining", |load| load.phase != AgentPhase::Ready).await?;
    agent.terminate()?;
    assert_eq!(agent.ended().await?.code(), Some(130));
    Ok(())
}

const DRAIN: Want = Want::Drain(DrainSettings { deadline_seconds: 60, withdraw_seconds: 0 });

#[tokio::test]
async fn an_agent_drains_and_comes_back_at_the_operators_word() -> Result<()> {
    let pod = Pod::ready().await?;
    assert_eq!(pod.give_signed(&pod.order(1, DRAIN).await?, 1).await?.0, 200);
    let load = pod.agent.wait_until("empty", |load| load.phase == AgentPhase::Empty).await?;
    assert_eq!(load.intent, Some(1));
    assert_eq!(get(&pod.agent, "/readyz").await?.0, 503);
    assert_eq!(get(&pod.agent, "/healthz").await?.0, 200);
    assert_eq!(post(&pod.agent, "/v1/chat/completions", &chat("Hello!", 4)).await?.0, 503);

    assert_eq!(pod.give_signed(&pod.order(2, Want::Serve).await?, 1).await?.0, 200);
    assert_eq!(get(&pod.agent, "/readyz").await?.0, 200);
    assert_eq!(post(&pod.agent, "/v1/chat/completions", &chat("Hello!", 4)).await?.0, 200);
    Ok(())
}

#[tokio::test]
async fn nobody_else_moves_a_replica_and_the_log_says_who_tried_what() -> Result<()> {
    let pod = Pod::ready().await?;
    let stream = open_stream(&pod.agent, &long_stream()).await?;
    let order = pod.order(7, DRAIN).await?;
    let body = serde_json::to_vec(&order)?;
    let signature = |seed: u8| Some(signature(&body, seed));
    let refused = |status: u16, code: &str| (status, code.to_owned());

    assert_eq!(pod.give(body.clone(), None).await?, refused(401, "signature_missing"));
    assert_eq!(pod.give(body.clone(), Some("00".into())).await?, refused(400, "signature_malformed"));
    assert_eq!(pod.give(body.clone(), signature(2)).await?, refused(403, "signature_wrong"));
    let changed = String::from_utf8(body.clone())?.replace("60", "0").into_bytes();
    assert_eq!(pod.give(changed, signature(1)).await?, refused(403, "signature_wrong"));
    assert_eq!(pod.give(vec![b' '; 10_000], signature(1)).await?, refused(413, "order_too_large"));
    let other_pod = Order { pod_uid: "uid-2".into(), ..order.clone() };
    assert_eq!(pod.give_signed(&other_pod, 1).await?, refused(403, "other_pod"));
    let other_process = Order { start_id: "before".into(), ..order.clone() };
    assert_eq!(pod.give_signed(&other_process, 1).await?, refused(409, "other_process"));
    let expired = Order { expires_up_ms: 0, ..order.clone() };
    assert_eq!(pod.give_signed(&expired, 1).await?, refused(403, "order_expired"));
    let public = Client::new().put(pod.agent.url(INTENT_PATH)).body(body.clone()).send().await?;
    assert_eq!(public.status(), 404, "the public port takes no orders");

    // The operator says that it serves; whoever kept the drain of before sends it again.
    assert_eq!(pod.give_signed(&pod.order(8, Want::Serve).await?, 1).await?.0, 200);
    assert_eq!(pod.give_signed(&order, 1).await?, refused(409, "lower_number"));
    assert_eq!(pod.give_signed(&Order { number: 8, ..order }, 1).await?, refused(409, "number_reused"));

    let load = pod.agent.load().await?;
    assert_eq!((load.phase, load.running, load.intent), (AgentPhase::Ready, 1, Some(8)));
    assert!(rest_of(stream).await?.contains("\"finish_reason\":\"length\""));
    let log = pod.agent.log();
    assert!(log.contains("order refused") && log.contains("signature_missing"), "{log}");
    assert!(log.contains("order taken") && log.contains("\"number\":8"), "{log}");
    Ok(())
}

#[tokio::test]
async fn a_key_that_is_added_while_the_agent_runs_is_believed() -> Result<()> {
    let pod = Pod::ready().await?;
    let order = pod.order(1, DRAIN).await?;
    assert_eq!(pod.give_signed(&order, 2).await?.1, "signature_wrong");
    std::fs::write(&pod.keys, format!("{} # now\n{} # next\n", public_key(1), public_key(2)))?;
    assert_eq!(pod.give_signed(&order, 2).await?.0, 200);
    std::fs::write(&pod.keys, public_key(2))?;
    assert_eq!(pod.give_signed(&pod.order(2, Want::Serve).await?, 1).await?.1, "signature_wrong");
    assert_eq!(pod.agent.load().await?.intent, Some(1));
    Ok(())
}

#[tokio::test]
async fn an_agent_started_by_hand_takes_no_orders() -> Result<()> {
    let agent = AgentProcess::ready(&[]).await?;
    let answer = Client::new().put(agent.admin_url(INTENT_PATH)).body("{}").send().await?;
    assert_eq!(answer.status(), 403);
    assert_eq!(answer.json::<Value>().await?["error"]["code"], "no_operator_keys");
    Ok(())
}

#[tokio::test]
async fn sixty_four_streams_at_once_all_end_well_and_say_what_each_says_alone() -> Result<()> {
    let agent = AgentProcess::ready(&[]).await?;
    let body = |index: u32| {
        let mut body = chat(&format!("What is {index} + {}?", index + 7), 24);
        body["stream"] = json!(true);
        body
    };
    let url = agent.url("/v1/chat/completions");
    let ask = |index| {
        let request = Client::new().post(&url).json(&body(index));
        async move { Ok::<_, anyhow::Error>(content(&rest_of(request.send().await?).await?)) }
    };
    let together: Vec<String> = join_all((0..64).map(&ask)).await.into_iter().collect::<Result<_>>()?;
    for index in (0..64).step_by(9) {
        assert_eq!(together[index as usize], ask(index).await?, "stream {index}");
    }
    let load = agent.wait_until("idle", |load| load.running == 0).await?;
    assert_eq!((load.waiting, load.referenced_blocks), (0, 0));
    Ok(())
}

/// Text of a stream that ended with a finish reason and `[DONE]`.
fn content(stream: &str) -> String {
    assert!(stream.ends_with("data: [DONE]\n\n") && !stream.contains("\"error\""), "{stream}");
    let chunks = stream.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let chunks: Vec<Value> = chunks.map(|data| serde_json::from_str(data).unwrap()).collect();
    assert!(chunks.iter().any(|chunk| chunk["choices"][0]["finish_reason"].is_string()), "{stream}");
    chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect()
}

#[tokio::test]
async fn a_model_that_cannot_be_loaded_is_reported_by_a_pod_and_ends_a_hand_started_agent() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("agent.json");
    let model = dir.path().join("no-model");
    let config = json!({"revision": "r7", "model": {"source": model, "servedNames": ["chat"]}});
    std::fs::write(&file, config.to_string())?;
    let agent = AgentProcess::start(&["--config", file.to_str().unwrap()])?;
    let load = agent.wait_until("failed", |load| load.phase == AgentPhase::Failed).await?;
    let error = load.error.unwrap_or_default();
    assert!(error.contains(model.to_str().unwrap()), "{error}");
    assert_eq!(load.revision, "r7");
    assert_eq!(get(&agent, "/healthz").await?.0, 200, "a restart would hide the reason");
    assert_eq!(get(&agent, "/readyz").await?.0, 503);

    let mut by_hand = AgentProcess::start(&["--model", model.to_str().unwrap()])?;
    assert_eq!(by_hand.ended().await?.code(), Some(1));
    assert!(by_hand.log().contains(model.to_str().unwrap()), "{}", by_hand.log());
    Ok(())
}
