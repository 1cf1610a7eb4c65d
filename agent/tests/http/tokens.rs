//! Fields that speak of tokens rather than of text: allowed and banned ones, ids in answers, counts, salts.

use axum::http::StatusCode;
use serde_json::{Value, json};
use stoker_engine::exec::sim::SimScript;

use crate::agent::*;

async fn text_of(agent: &Agent, fields: Value) -> String {
    let mut body = json!({"prompt": "hi", "max_tokens": 12});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let (status, answer) = agent.post("/v1/completions", body).await;
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn only_allowed_tokens_come_and_no_bad_word() {
    let agent = Agent::new();
    assert_eq!(text_of(&agent, json!({})).await, "All is well.");
    assert_eq!(text_of(&agent, json!({"allowed_token_ids": [65, 66], "max_tokens": 3})).await, "AAA");
    assert_eq!(text_of(&agent, json!({"bad_words": ["well"]})).await, "All is welm.", "the next token instead");
    assert_eq!(text_of(&agent, json!({"bad_words": ["is"]})).await, "All it well.");
    let both = json!({"guided_regex": "[A-Z]l[a-z ]*", "bad_words": ["All"], "max_tokens": 3});
    assert_eq!(text_of(&agent, both).await, "Alm", "a grammar and a filter hold together");
}

#[tokio::test]
async fn a_word_in_the_prompt_bans_nothing_of_the_answer() {
    let agent = Agent::new();
    let body = json!({"prompt": "wel", "max_tokens": 12, "bad_words": ["welA"]});
    let (_, answer) = agent.post("/v1/completions", body).await;
    assert_eq!(answer["choices"][0]["text"], "All is well.");
}

#[tokio::test]
async fn ids_of_prompt_and_answer_are_told_to_who_asks() {
    let agent = Agent::new();
    let (_, chat_answer) = agent.post("/v1/chat/completions", chat(json!({"return_token_ids": true}))).await;
    let prompt: Vec<u32> = "[user]hi[assistant]".bytes().map(u32::from).collect();
    let ids: Vec<u32> = "All is well.".bytes().map(u32::from).chain([256]).collect();
    assert_eq!(
        (&chat_answer["prompt_token_ids"], &chat_answer["choices"][0]["token_ids"]),
        (&json!(prompt), &json!(ids))
    );
    let (_, text) = agent.post("/v1/completions", json!({"prompt": [[7, 8], [9]], "return_token_ids": true})).await;
    for (choice, prompt) in [(0, json!([7, 8])), (1, json!([9]))] {
        let choice = &text["choices"][choice];
        assert_eq!((&choice["prompt_token_ids"], &choice["token_ids"]), (&prompt, &json!(ids)));
    }
    let (_, quiet) = agent.post("/v1/chat/completions", chat(json!({}))).await;
    assert_eq!((&quiet["prompt_token_ids"], &quiet["choices"][0]["token_ids"]), (&Value::Null, &Value::Null));
}

#[tokio::test]
async fn ids_of_a_stream_add_up_and_the_prompts_are_in_its_first_chunk() {
    let agent = Agent::new();
    let ids: Vec<u32> = "All is well.".bytes().map(u32::from).chain([256]).collect();
    for (path, body) in [
        ("/v1/chat/completions", chat(json!({"stream": true, "return_token_ids": true}))),
        ("/v1/completions", json!({"prompt": "hi", "stream": true, "return_token_ids": true})),
    ] {
        let response = agent.send("POST", path, &body.to_string()).await;
        let chunks = events(&Stream { body: response.into_body() }.rest().await);
        let of = |chunk: &Value| chunk["choices"][0]["token_ids"].as_array().cloned().unwrap_or_default();
        assert_eq!(Value::from(chunks.iter().flat_map(of).collect::<Vec<_>>()), json!(ids), "{path}");
        let tells_prompt = |chunk: &Value| {
            [&chunk["prompt_token_ids"], &chunk["choices"][0]["prompt_token_ids"]].iter().any(|ids| ids.is_array())
        };
        assert!(tells_prompt(&chunks[0]) && !chunks[1..].iter().any(tells_prompt), "{path}");
    }
}

#[tokio::test]
async fn log_probabilities_name_tokens_by_id_to_who_asks() {
    let agent = Agent::new();
    let body = json!({"prompt": "hi", "logprobs": 1, "max_tokens": 2, "return_tokens_as_token_ids": true});
    let (_, answer) = agent.post("/v1/completions", body).await;
    let logprobs = &answer["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["token_id:65", "token_id:108"]));
    assert!(logprobs["top_logprobs"][0].as_object().unwrap().keys().all(|name| name.starts_with("token_id:")));
}

/// The chunks of a streamed completion of five tokens.
async fn chunks_with(agent: &Agent, options: Value) -> Vec<Value> {
    let body = json!({"prompt": "hi", "stream": true, "max_tokens": 5, "stream_options": options});
    let response = agent.send("POST", "/v1/completions", &body.to_string()).await;
    events(&Stream { body: response.into_body() }.rest().await)
}

#[tokio::test]
async fn counts_come_with_every_chunk_for_who_wants_them() {
    let agent = Agent::new();
    for (options, n_without_choices) in [
        (json!({"include_usage": true, "continuous_usage_stats": true}), 1),
        // Who has not asked for a chunk of counts gets them in the others only.
        (json!({"continuous_usage_stats": true}), 0),
    ] {
        let chunks = chunks_with(&agent, options.clone()).await;
        let counts: Vec<u64> =
            chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap()).collect();
        assert!(counts.is_sorted() && (counts[0], counts[counts.len() - 1]) == (1, 5), "{options}: {counts:?}");
        assert!(chunks.iter().all(|chunk| chunk["usage"]["prompt_tokens"] == 2));
        let is_empty = |chunk: &&Value| chunk["choices"].as_array().unwrap().is_empty();
        assert_eq!(chunks.iter().filter(is_empty).count(), n_without_choices, "{options}");
    }
    let none = chunks_with(&agent, json!({"include_usage": false, "continuous_usage_stats": true})).await;
    assert!(none.iter().all(|chunk| chunk.get("usage").is_none()), "who wants none gets none: {none:?}");
}

#[tokio::test]
async fn who_has_another_salt_finds_no_cached_tokens() {
    let agent = Agent::new();
    let cached = async |salt: Value| {
        let body = json!({"prompt": "x".repeat(64), "max_tokens": 1, "cache_salt": salt});
        let (_, answer) = agent.post("/v1/completions", body).await;
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    let mut found = Vec::new();
    for salt in [json!("a"), json!("b"), json!(null), json!("a"), json!("b"), json!(null)] {
        found.push(cached(salt).await);
    }
    assert_eq!(found, [0, 0, 0, 48, 48, 48]);
}

#[tokio::test]
async fn what_a_device_does_not_compute_is_refused_by_its_field() {
    let agent = Agent::new();
    for (field, value) in [("prompt_logprobs", json!(1)), ("logprob_token_ids", json!([5]))] {
        let (status, answer) =
            agent.post("/v1/completions", json!({"prompt": "hi", "logprobs": 1, field: value})).await;
        assert_eq!((status, &answer["error"]["param"]), (StatusCode::BAD_REQUEST, &json!(field)), "{answer}");
    }
    let (status, answer) = agent.post("/v1/completions", json!({"prompt": "hi", "logprob_token_ids": [5]})).await;
    assert_eq!((status, &answer["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("logprob_token_ids")));
}

#[tokio::test]
async fn the_assistants_own_words_are_echoed_before_its_answer() {
    let agent = Agent::with_template(SimScript::default(), "{% for m in messages %}{{ m.content }}{% endfor %}");
    let said = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well: "}]);
    let ask = |echo: bool| json!({"messages": said, "echo": echo, "continue_final_message": true});
    for (echo, expected) in [(true, "Well: All is well."), (false, "All is well.")] {
        let (_, answer) = agent.post("/v1/chat/completions", ask(echo)).await;
        assert_eq!(answer["choices"][0]["message"]["content"], expected);
    }
    let streamed = chat(json!({"messages": said, "echo": true, "continue_final_message": true, "stream": true}));
    let response = agent.send("POST", "/v1/chat/completions", &streamed.to_string()).await;
    let chunks = events(&Stream { body: response.into_body() }.rest().await);
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "Well: All is well.");
}

#[tokio::test]
async fn the_other_end_of_a_prompt_is_kept_for_who_says_so() {
    let agent = Agent::new();
    for (side, kept) in [("left", json!([3, 4])), ("right", json!([1, 2]))] {
        let body = json!({"prompt": [1, 2, 3, 4], "truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": true});
        let (_, answer) = agent.post("/v1/completions", body).await;
        assert_eq!(answer["choices"][0]["prompt_token_ids"], kept);
    }
}

#[tokio::test]
async fn one_path_takes_both_kinds_of_requests() {
    let agent = Agent::new();
    for (body, object) in [(chat(json!({})), "chat.completion"), (json!({"prompt": "hi"}), "text_completion")] {
        let (status, answer) = agent.post("/invocations", body).await;
        assert_eq!((status, &answer["object"]), (StatusCode::OK, &json!(object)));
    }
}
