//! `/score` and `/rerank` over real models: beside what sentence-transformers says of the same files. The goldens are made by
//! `tests/tools/make_rerank_goldens.py` and `make_embedding_goldens.py`.

use std::{
    fs,
    path::{Path, PathBuf},
};

use serde_json::{Value, json};
use stoker_engine::{
    DeviceChoice, Engine, EngineConfig, EngineHandle, EngineLimits, LoadedModel, ModelFiles,
    constraint::Masks,
    exec::{CpuExecutor, ExecError, Executor},
    sched::{Step, StepOutput},
};

use crate::agent::Agent;

/// Scores differ by the order of sums only: as logits do, relative to the largest (`F32_TOLERANCE` of the engine's tests).
const TOLERANCE: f64 = 1e-4;

/// As a GPU: it tells of the tokens that it draws, and of no other.
struct TokensOnly(CpuExecutor);

impl Executor for TokensOnly {
    fn launch(&mut self, step: &Step<'_>) -> Result<(), ExecError> {
        self.0.launch(step)
    }

    fn constrain(&mut self, masks: Masks<'_>) -> Result<(), ExecError> {
        self.0.constrain(masks)
    }

    fn finish(&mut self) -> Result<StepOutput, ExecError> {
        self.0.finish()
    }
}

fn directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/goldens").join(name)
}

fn golden(name: &str) -> Value {
    serde_json::from_str(&fs::read_to_string(directory(name).join("golden.json")).unwrap()).unwrap()
}

fn config(name: &str) -> EngineConfig {
    let limits = EngineLimits { max_batched_tokens: Some(64), ..EngineLimits::default() };
    EngineConfig { model: ModelFiles::Directory(directory(name)), limits, device: DeviceChoice::Cpu }
}

fn engine(name: &str) -> EngineHandle {
    Engine::start(config(name), |_| {}).unwrap()
}

fn tokens_only(name: &str) -> EngineHandle {
    let LoadedModel { executor, parts } = LoadedModel::open(&config(name), &|_| {}).unwrap();
    Engine::start_with(Box::new(TokensOnly(executor)), parts)
}

fn numbers(list: &Value) -> Vec<f64> {
    list.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn assert_near(ours: &[f64], theirs: &[f64], what: &str) {
    let scale = theirs.iter().fold(0.0f64, |max, score| max.max(score.abs()));
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert!((ours - theirs).abs() <= TOLERANCE * scale, "{what}: {ours} and {theirs} of {scale}");
    }
}

/// What `/score` says of a query and documents.
async fn scores(agent: &Agent, query: &Value, documents: &Value, fields: Value) -> Vec<f64> {
    let mut body = json!({"queries": query, "documents": documents});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let (status, answer) = agent.post("/score", body).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]);
    let data = answer["data"].as_array().unwrap();
    assert!(data.iter().enumerate().all(|(idx, entry)| entry["index"] == idx && entry["object"] == "score"));
    data.iter().map(|entry| entry["score"].as_f64().unwrap()).collect()
}

#[tokio::test]
async fn a_causal_reranker_scores_as_sentence_transformers_does() {
    let name = "rerank/qwen3-logits";
    let golden = golden(name);
    let (query, documents) = (&golden["query"], &golden["documents"]);
    for (device, engine) in [("cpu", engine(name)), ("one that tells of what it draws", tokens_only(name))] {
        let agent = Agent::of(engine);
        // The second time the cache has the prompts.
        for _ in 0..2 {
            let ours = scores(&agent, query, documents, json!({})).await;
            assert_near(&ours, &numbers(&golden["scores"]), device);
            assert!(ours[0] == ours[4] && ours[0] != ours[1], "equal texts have equal scores: {ours:?}");
        }
        let raw = scores(&agent, query, documents, json!({"use_activation": false})).await;
        assert_near(&raw, &numbers(&golden["raw"]), device);
        let told = scores(&agent, query, documents, json!({"instruction": golden["instruction"]})).await;
        assert_near(&told, &numbers(&golden["told"]), device);
        assert!(told != scores(&agent, query, documents, json!({})).await, "the instruction counts");
    }
}

#[tokio::test]
async fn documents_come_best_first_with_what_clients_of_jina_and_cohere_read() {
    let golden = golden("rerank/qwen3-logits");
    let agent = Agent::of(engine("rerank/qwen3-logits"));
    let (query, documents) = (&golden["query"], &golden["documents"]);
    let theirs = numbers(&golden["scores"]);
    let mut order: Vec<usize> = (0..theirs.len()).collect();
    order.sort_by(|a, b| theirs[*b].total_cmp(&theirs[*a]));
    for path in ["/rerank", "/v1/rerank", "/v2/rerank"] {
        let (status, answer) = agent.post(path, json!({"query": query, "documents": documents})).await;
        assert_eq!(status, 200, "{answer}");
        assert!(answer["id"].as_str().unwrap().starts_with("rerank-") && answer["model"] == "sim", "{answer}");
        let results = answer["results"].as_array().unwrap();
        let indices: Vec<usize> = results.iter().map(|result| result["index"].as_u64().unwrap() as usize).collect();
        assert_eq!(indices, order);
        for result in results {
            let idx = result["index"].as_u64().unwrap() as usize;
            assert_eq!(result["document"], json!({"text": documents[idx]}));
            assert_near(&[result["relevance_score"].as_f64().unwrap()], &theirs[idx..=idx], path);
        }
    }
    let objects: Vec<Value> = documents.as_array().unwrap().iter().map(|text| json!({"text": text})).collect();
    let body = json!({"query": {"text": query}, "documents": objects, "top_n": 2, "return_documents": false,
                      "request_id": "mine", "user": "me", "priority": 1});
    let (_, answer) = agent.post("/v1/rerank", body).await;
    let best: Vec<Value> = answer["results"].as_array().unwrap().iter().map(|result| result["index"].clone()).collect();
    assert_eq!((best, &answer["id"]), (vec![json!(order[0]), json!(order[1])], &json!("rerank-mine")), "{answer}");
    assert!(answer["results"][0].get("document").is_none(), "{answer}");
}

#[tokio::test]
async fn a_document_is_read_as_far_as_the_client_says() {
    let agent = Agent::of(engine("rerank/qwen3-logits"));
    let of = async |document: &str, fields: Value| scores(&agent, &json!("?"), &json!([document]), fields).await;
    let cut = of("abcdefghij", json!({"max_tokens_per_doc": 4})).await;
    assert_eq!(cut, of("abcd", json!({})).await, "a token is a byte here");
    let beyond_the_context = "abcdefghij".repeat(150);
    assert_eq!(of(&beyond_the_context, json!({"max_tokens_per_doc": 4})).await, cut);
    assert_eq!(of("abcd", json!({"max_tokens_per_doc": 4})).await, cut);
    assert_eq!(of("abcd", json!({"max_tokens_per_doc": 0})).await, cut, "0 is no bound");
    assert_ne!(of("abcdefghij", json!({})).await, cut);
}

#[tokio::test]
async fn a_model_of_embeddings_compares_them() {
    for name in ["embeddings/qwen3-last", "embeddings/llama-mean"] {
        let golden = golden(name);
        let vectors: Vec<Vec<f64>> = golden["vectors"].as_array().unwrap().iter().map(numbers).collect();
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let cosine = |a: &[f64], b: &[f64]| dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
        let agent = Agent::of(engine(name));
        let texts = &golden["texts"];
        let of_first: Vec<f64> = vectors.iter().map(|vector| cosine(&vectors[0], vector)).collect();
        assert_near(&scores(&agent, &texts[0], texts, json!({})).await, &of_first, name);
        let mut turned = texts.as_array().unwrap().clone();
        turned.rotate_left(1);
        let in_pairs: Vec<f64> =
            (0..vectors.len()).map(|idx| cosine(&vectors[idx], &vectors[(idx + 1) % vectors.len()])).collect();
        assert_near(&scores(&agent, texts, &json!(turned), json!({})).await, &in_pairs, name);
        let (status, answer) = agent.post("/score", json!({"text_1": "a", "text_2": "b", "instruction": "x"})).await;
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!("instruction")), "{answer}");
    }
}

#[tokio::test]
async fn heads_tell_what_devices_did_for_all_texts_of_a_request() {
    let [reranker, embedder] = ["rerank/qwen3-logits", "embeddings/qwen3-last"].map(|name| Agent::of(engine(name)));
    let pairs = json!({"queries": "a", "documents": ["b", "c"]});
    for (agent, path, body) in [
        (&reranker, "/score", pairs.clone()),
        (&reranker, "/rerank", json!({"query": "a", "documents": ["b", "c"]})),
        (&embedder, "/score", pairs),
        (&embedder, "/v1/embeddings", json!({"input": ["a", "b"]})),
    ] {
        let begun = std::time::Instant::now();
        let response = agent.send("POST", path, &body.to_string()).await;
        let passed = begun.elapsed().as_secs_f64();
        assert_eq!(response.status(), 200, "{path}");
        let told: f64 = response.headers()["x-stoker-device-seconds"].to_str().unwrap().parse().unwrap();
        assert!(told > 0.0 && told <= passed, "{path}: {told} in {passed}");
    }
}

#[tokio::test]
async fn what_cannot_be_compared_is_refused_by_name() {
    let reranker = Agent::of(engine("rerank/qwen3-logits"));
    let texts = |n: usize| json!(vec!["x"; n]);
    let long = "word ".repeat(2000);
    for (path, body, param, said) in [
        ("/score", json!({}), "text_1", "is missing"),
        ("/score", json!({"text_1": "a"}), "text_2", "is missing"),
        ("/score", json!({"queries": "a", "documents": "b", "text_1": "c"}), "text_1", "unknown"),
        ("/score", json!({"text_1": texts(2), "text_2": texts(3)}), "text_2", "send one `text_1` for all, or as many"),
        ("/score", json!({"text_1": "a", "text_2": []}), "text_2", "at least one"),
        ("/score", json!({"text_1": "a", "text_2": texts(2049)}), "text_2", "at most 2048"),
        ("/score", json!({"text_1": "a", "text_2": {"image": "x"}}), "text_2", "only text is compared"),
        ("/score", json!({"text_1": "a", "text_2": long}), "text_2", "maximum context length"),
        ("/rerank", json!({"documents": ["a"]}), "query", "is missing"),
        ("/rerank", json!({"query": "a"}), "documents", "is missing"),
        ("/rerank", json!({"query": "a", "documents": []}), "documents", "at least one"),
        ("/rerank", json!({"query": ["a"], "documents": ["b"]}), "query", "only text is compared"),
        ("/rerank", json!({"query": "a", "documents": ["b", 7]}), "documents", "only text is compared"),
        ("/rerank", json!({"query": "a", "documents": [["b"]]}), "documents", "only text is compared"),
        ("/rerank", json!({"query": {}, "documents": ["b"]}), "query", "only text is compared"),
        (
            "/rerank",
            json!({"query": {"text": "a", "image": "b"}, "documents": ["b"]}),
            "query",
            "only text is compared",
        ),
        ("/rerank", json!({"query": "a", "documents": ["b"], "top_n": -1}), "top_n", "0 or more"),
        ("/rerank", json!({"query": "a", "documents": ["b"], "top_k": 1}), "top_k", "did you mean `top_n`?"),
        ("/rerank", json!({"query": "a", "documents": ["b"], "rank_fields": ["t"]}), "rank_fields", "unknown"),
        ("/rerank", json!({"query": long, "documents": ["b"]}), "documents", "maximum context length"),
        (
            "/rerank",
            json!({"query": "a", "documents": ["b"], "chat_template_kwargs": {"mood": 1}}),
            "chat_template_kwargs.mood",
            "reads no variable",
        ),
        (
            "/rerank",
            json!({"query": "a", "documents": ["b"], "truncate_prompt_tokens": 9}),
            "truncate_prompt_tokens",
            "max_tokens_per_doc",
        ),
    ] {
        let (status, answer) = reranker.post(path, body).await;
        assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!(param)), "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(said), "{said}: {answer}");
    }
    // One that was made for chat, as the simulated one.
    let (status, answer) = Agent::new().post("/rerank", json!({"query": "a", "documents": ["b"]})).await;
    assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, &json!("model")), "{answer}");
    let (status, _) = reranker.post("/score", json!({"model": "other", "text_1": "a", "text_2": "b"})).await;
    assert_eq!(status, 404);
}
