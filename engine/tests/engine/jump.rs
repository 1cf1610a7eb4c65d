//! Jump ahead: where a grammar leaves one text, its tokens come without a draw each, and nobody can tell from what comes. The same
//! requests ask for log-probabilities, too: then every token is drawn.

use std::sync::Arc;

use serde_json::{Value, json};
use stoker_engine::{
    EngineHandle, EngineLimits, FinishReason, Request, RequestEvent, RequestStream, Resume, SamplingParams, StopParams,
    TokenId, Usage,
    constraint::{Constraint, Grammar, Matcher},
    grammar::{GrammarCompiler, GrammarSpec},
};

use crate::{common, overlap::start_with_two};

/// The same grammar with every spelling of what must come.
#[derive(Debug)]
struct Anyhow(Constraint);

impl Grammar for Anyhow {
    fn matcher(&self) -> Box<dyn Matcher> {
        self.0.0.any_spelling()
    }
}

/// Schemas as applications have them: many required keys, long ones, keys that begin alike, nesting, unions, values of which there
/// is one, and none that forces anything.
fn schemas() -> Vec<Value> {
    let object = |fields: &[(&str, Value)]| {
        let names: Vec<&str> = fields.iter().map(|(name, _)| *name).collect();
        let properties: serde_json::Map<String, Value> =
            fields.iter().map(|(name, schema)| ((*name).to_owned(), schema.clone())).collect();
        json!({"type": "object", "properties": properties, "required": names, "additionalProperties": false})
    };
    let number = || json!({"type": "integer", "minimum": 0, "maximum": 99});
    let word = || json!({"type": "string", "maxLength": 12});
    let alike = ["delivery_address", "delivery_address_line", "delivery_addressee"].map(|name| (name, word()));
    let order = object(&[("customer", word()), ("quantity", number()), ("unit_price_in_euros", number())]);
    vec![
        order.clone(),
        object(&alike),
        json!({"type": "array", "minItems": 2, "maxItems": 3, "items": order}),
        object(&[
            ("kind", json!({"const": "a kind that is always the same"})),
            ("size", json!({"enum": ["small", "smaller"]})),
        ]),
        json!({"anyOf": [object(&[("shape", json!({"const": "circle"})), ("radius", number())]),
                         object(&[("shape", json!({"const": "square"})), ("side", number())])]}),
        object(&[
            ("über_größe", word()),
            ("日本語のキー", json!({"type": "boolean"})),
            ("🔥", json!({"type": "null"})),
        ]),
        object(&[("a", number()), ("b", number()), ("c", json!({"type": ["null", "boolean"]}))]),
        json!({"type": "object"}),
    ]
}

/// Grammars of each schema and of other notations.
fn grammars(engine: &EngineHandle) -> Vec<Constraint> {
    let compiler = GrammarCompiler::new(engine.tokenizer(), &engine.model().eos).unwrap();
    let choice = GrammarSpec::Choice(vec!["The parcel was delivered.".into(), "The parcel was returned.".into()]);
    let regex = GrammarSpec::Regex("Order number [0-9]{2,4} is for [A-Z][a-z]{2,9}, as agreed\\.".into());
    let specs = schemas().into_iter().map(GrammarSpec::Json).chain([choice, regex]);
    specs.map(|spec| compiler.compile(&spec).unwrap().0).collect()
}

/// All that a client is told, but for log-probabilities, of which there is one a token or none.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Told {
    tokens: Vec<TokenId>,
    text: String,
    n_prompt_positions: usize,
    reason: FinishReason,
    stop_match: Option<String>,
    usage: Usage,
}

fn read_all(mut stream: RequestStream) -> Told {
    let (mut tokens, mut text, mut n_logprobs, mut n_prompt_positions) = (Vec::new(), String::new(), 0, 0);
    loop {
        match stream.blocking_next().expect("a terminal comes") {
            RequestEvent::Prompt(positions) => {
                assert!(tokens.is_empty(), "a prompt is told of before the first token");
                n_prompt_positions = positions.len();
            }
            RequestEvent::Embedding(_) => {}
            RequestEvent::Delta { text: more, tokens: new, logprobs } => {
                text.push_str(&more);
                tokens.extend(new);
                n_logprobs += logprobs.len();
            }
            RequestEvent::Finished { reason, stop_match, usage, .. } => {
                assert!([0, tokens.len()].contains(&n_logprobs), "{n_logprobs} for {} tokens", tokens.len());
                return Told { tokens, text, n_prompt_positions, reason, stop_match, usage };
            }
        }
    }
}

fn told(engine: &EngineHandle, requests: Vec<Request>) -> Vec<Told> {
    let streams: Vec<_> = requests.into_iter().map(|request| engine.submit(request).unwrap()).collect();
    streams.into_iter().map(read_all).collect()
}

/// Greedy and drawn, with penalties, ended by length, by a stop string, by a stop token, by the grammar; `n` decides.
fn asked(n: u32, constraint: Constraint) -> Request {
    let prompt: Vec<TokenId> = (0..9 + n * 3).map(|i| 300 + (n * 131 + i * i * 7 + i * 13) % 1500).collect();
    let stop = StopParams {
        max_tokens: if n.is_multiple_of(5) { 1 + n % 23 } else { 90 },
        min_tokens: if n.is_multiple_of(3) { 6 } else { 0 },
        stop: if n.is_multiple_of(4) { vec!["quant".into(), "agreed".into(), "side".into()] } else { vec![] },
        stop_token_ids: if n.is_multiple_of(7) { (700..1000).collect() } else { vec![] },
        ..StopParams::default()
    };
    let sampling = SamplingParams {
        temperature: (n % 3) as f32 * 0.6,
        frequency_penalty: if n.is_multiple_of(2) { 0.7 } else { 0.0 },
        repetition_penalty: if n.is_multiple_of(6) { 1.3 } else { 1.0 },
        seed: n.into(),
        constraint: Some(constraint),
        ..SamplingParams::default()
    };
    Request { prompt, sampling, stop, prompt_logprobs: n.is_multiple_of(11).then_some(1), ..Request::default() }
}

/// As many of each grammar.
fn all_asked(engine: &EngineHandle, of_each: u32) -> Vec<Request> {
    let grammars = grammars(engine);
    let n_grammars = grammars.len() as u32;
    (0..of_each * n_grammars).map(|n| asked(n, grammars[(n % n_grammars) as usize].clone())).collect()
}

fn one_by_one(requests: &[Request]) -> Vec<Request> {
    requests.iter().map(|request| Request { logprobs: Some(0), ..request.clone() }).collect()
}

pub(crate) fn roomy() -> EngineLimits {
    EngineLimits { max_model_len: Some(512), ..EngineLimits::default() }
}

/// A cache in which somebody is preempted.
pub(crate) fn tight() -> EngineLimits {
    EngineLimits { kv_cache_tokens: Some(768), expected_completion: None, ..roomy() }
}

/// The same beside two that grow until a tight cache has no room for both: one of them, or who stands beside them, is preempted.
fn told_in_company(engine: &EngineHandle, requests: Vec<Request>) -> Vec<Told> {
    let stop = StopParams { max_tokens: 400, min_tokens: 400, ..StopParams::default() };
    let long = |n: u32| Request { prompt: vec![400 + n, 7, 9], stop: stop.clone(), ..Request::default() };
    let company = [1, 2].map(|n| engine.submit(long(n)).unwrap());
    let told = told(engine, requests);
    for stream in company {
        read_all(stream);
    }
    told
}

/// But for what a cache held: in another order, others find it.
fn assert_same(found: &[Told], expected: &[Told]) {
    assert_eq!(found.len(), expected.len());
    let without_cache = |told: &Told| Told { usage: Usage { cached_tokens: 0, ..told.usage }, ..told.clone() };
    for (n, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(without_cache(found), without_cache(expected), "request {n}");
    }
}

#[test]
fn what_comes_is_what_would_have_been_drawn() {
    let model = common::ember();
    let one = common::start(&model, roomy());
    let requests = all_asked(&one, 6);
    let expected = told(&one, one_by_one(&requests));
    for end in [FinishReason::Stop, FinishReason::Length] {
        assert!(expected.iter().filter(|told| told.reason == end).count() > 4, "some end by {end:?}");
    }
    assert!(expected.iter().filter(|told| told.stop_match.is_some()).count() > 4, "some end by a stop string");
    assert!(expected.iter().any(|told| told.n_prompt_positions > 0), "some ask about their prompts");
    assert_same(&told(&one, requests.clone()), &expected);
    let tight_one = common::start(&model, tight());
    assert_same(&told_in_company(&tight_one, requests), &expected);
    assert!(tight_one.load().preemptions > 0, "a tight cache preempts somebody");
    let expected: Vec<Told> = expected.into_iter().map(|told| Told { n_prompt_positions: 0, ..told }).collect();
    assert_same(&told_as_drawn(&start_with_two(&model, roomy()), &start_with_two(&model, tight())), &expected);
}

/// What an engine tells that reads no prompts: the same whether what must come is drawn or not, and in a cache in which somebody is
/// preempted.
pub(crate) fn told_as_drawn(roomy: &EngineHandle, tight: &EngineHandle) -> Vec<Told> {
    let unread = |request| Request { prompt_logprobs: None, ..request };
    let requests: Vec<Request> = all_asked(roomy, 6).into_iter().map(unread).collect();
    let drawn = told(roomy, one_by_one(&requests));
    assert_same(&told(roomy, requests.clone()), &drawn);
    assert_same(&told_in_company(tight, requests), &drawn);
    assert!(tight.load().preemptions > 0, "a tight cache preempts somebody");
    drawn
}

/// Every token is one that its grammar allows there, by a matcher that follows what was told.
pub(crate) fn assert_grammars_are_followed(engine: &EngineHandle) {
    let unread = |request| Request { prompt_logprobs: None, ..request };
    let requests: Vec<Request> = all_asked(engine, 4).into_iter().map(unread).collect();
    for (n, (request, told)) in requests.iter().zip(told(engine, requests.clone())).enumerate() {
        assert!(matches!(told.reason, FinishReason::Stop | FinishReason::Length), "request {n}: {:?}", told.reason);
        let mut matcher = request.sampling.constraint.as_ref().expect("all have one").0.matcher();
        for token in &told.tokens {
            let mut allowed = vec![0; engine.model().vocab_size.div_ceil(32) as usize];
            matcher.allow(&mut allowed).unwrap();
            assert!(allowed[*token as usize / 32] >> (token % 32) & 1 == 1, "request {n}: {token} of {:?}", told.text);
            matcher.accept(*token).unwrap();
        }
    }
}

#[test]
fn every_token_is_one_that_its_grammar_allows() {
    assert_grammars_are_followed(&start_with_two(&common::ember(), roomy()));
}

#[test]
fn forced_tokens_take_no_step_of_their_own() {
    for engine in [common::start(&common::ember(), roomy()), start_with_two(&common::ember(), roomy())] {
        let steps_of = |requests: Vec<Request>| {
            let before = engine.load();
            let all: Vec<Told> = requests.into_iter().flat_map(|request| told(&engine, vec![request])).collect();
            let n_tokens: u64 = all.iter().map(|told| told.tokens.len() as u64).sum();
            let (forced, steps) =
                (engine.load().forced_tokens - before.forced_tokens, engine.load().steps - before.steps);
            println!("{n_tokens} tokens, {forced} of them forced, in {steps} steps");
            (n_tokens, forced, steps)
        };
        let text = "The parcel was delivered to Zürich on a Monday.";
        let compiler = GrammarCompiler::new(engine.tokenizer(), &engine.model().eos).unwrap();
        let (constraint, _) = compiler.compile(&GrammarSpec::Choice(vec![text.into()])).unwrap();
        let only = Request { stop: StopParams { max_tokens: 99, ..StopParams::default() }, ..asked(1, constraint) };
        let (n_tokens, forced, _) = steps_of(vec![only.clone()]);
        assert!(n_tokens > 12 && forced + 2 >= n_tokens, "{forced} of {n_tokens} tokens of a text that is known");
        let (_, forced, drawn) = steps_of(one_by_one(&[only]));
        assert!(
            forced == 0 && drawn >= n_tokens,
            "log-probabilities are the model's own: {drawn} steps for {n_tokens} tokens"
        );
        let unread = |request| Request { prompt_logprobs: None, ..request };
        // Of steps nothing is said: on a busy machine masks are late, and each one that is costs a step.
        let (n_tokens, forced, _) = steps_of(all_asked(&engine, 2).into_iter().map(unread).collect());
        assert!(forced * 5 > n_tokens, "{forced} of {n_tokens} tokens of all grammars");
    }
}

#[test]
fn thirty_seeded_runs_are_one_text_and_n_of_one_prompt_are_each_their_own() {
    let engine = common::start(&common::ember(), roomy());
    let order = grammars(&engine).swap_remove(0);
    let drawn = |seed: u64| {
        let asked = asked(1, order.clone());
        Request { sampling: SamplingParams { temperature: 0.9, seed, ..asked.sampling }, ..asked }
    };
    let first = told(&engine, one_by_one(&[drawn(7)])).swap_remove(0);
    // All at once: whichever comes first, others find its blocks.
    let thirty = told(&engine, (0..30).map(|_| drawn(7)).collect());
    assert!(thirty.iter().all(|one| (&one.tokens, &one.text) == (&first.tokens, &first.text)));
    let seeds = told(&engine, (0..8).map(drawn).collect());
    let alone: Vec<Told> = (0..8).flat_map(|seed| told(&engine, one_by_one(&[drawn(seed)]))).collect();
    let texts = |all: &[Told]| all.iter().map(|told| told.text.clone()).collect::<Vec<_>>();
    assert_eq!(texts(&seeds), texts(&alone));
}

#[test]
fn an_answer_that_another_engine_began_goes_on_the_same() {
    let engine = common::start(&common::ember(), roomy());
    for n in [1, 2, 8] {
        for grammar in grammars(&engine) {
            let asked = asked(n, grammar);
            let whole = told(&engine, vec![asked.clone()]).swap_remove(0);
            let begun: Vec<usize> = (1..whole.tokens.len()).step_by(3).collect();
            let resumed = |n_told: &usize| {
                let resume = Some(Resume { tokens: whole.tokens[..*n_told].to_vec(), ..Resume::default() });
                Request { resume, ..asked.clone() }
            };
            let rests = told(&engine, begun.iter().map(resumed).collect());
            for (n_told, rest) in begun.into_iter().zip(rests) {
                assert_eq!(rest.tokens, whole.tokens[n_told..], "behind {n_told} of {:?}", whole.text);
                assert_eq!(
                    (rest.usage.completion_tokens, rest.reason),
                    (whole.usage.completion_tokens, whole.reason.clone())
                );
            }
        }
    }
}

#[test]
fn who_narrows_masks_may_have_other_spellings() {
    let engine = common::start(&common::ember(), roomy());
    let compiler = GrammarCompiler::new(engine.tokenizer(), &engine.model().eos).unwrap();
    let text = "The parcel was delivered.";
    let (constraint, _) = compiler.compile(&GrammarSpec::Choice(vec![text.into()])).unwrap();
    let plain =
        Request { stop: StopParams { max_tokens: 40, ..StopParams::default() }, ..asked(1, constraint.clone()) };
    let spelt = told(&engine, vec![plain.clone()]).swap_remove(0);
    let unwanted = spelt.tokens[1];
    let filter = stoker_engine::token_filter::TokenFilter::new(&[], vec![vec![unwanted]], Some(constraint));
    let banned = SamplingParams { constraint: Some(Constraint(Arc::new(filter))), ..plain.sampling.clone() };
    let biased = SamplingParams { logit_bias: [(unwanted, -1e4)].into(), ..plain.sampling.clone() };
    for sampling in [banned, biased] {
        let found = told(&engine, vec![Request { sampling, ..plain.clone() }]).swap_remove(0);
        assert_eq!((found.text.as_str(), found.reason), (text, FinishReason::Stop));
        assert!(!found.tokens.contains(&unwanted), "{:?} without {unwanted}", found.tokens);
    }
}

/// The model's held-out tasks that ask for JSON: what to send, and the answer.
fn extractions(engine: &EngineHandle) -> Vec<(Vec<TokenId>, Value)> {
    let tasks = std::fs::read_to_string(common::ember().join("eval/heldout.jsonl")).unwrap();
    let task = |line: &str| {
        let task: Value = serde_json::from_str(line).unwrap();
        let asked = task["messages"][0]["content"].as_str().filter(|_| task["task"] == "extract")?;
        let prompt = format!("<|begin|><|user|>{asked}<|end|><|assistant|>");
        let expected = serde_json::from_str(task["expected"].as_str()?).unwrap();
        Some((engine.tokenizer().encode(&prompt, false).unwrap(), expected))
    };
    tasks.lines().filter_map(task).collect()
}

fn schema_of(expected: &Value) -> Value {
    let fields = expected.as_object().expect("it is an object");
    let kind = |value: &Value| json!({"type": if value.is_string() { "string" } else { "integer" }});
    let properties: serde_json::Map<String, Value> =
        fields.iter().map(|(name, value)| (name.clone(), kind(value))).collect();
    let required: Vec<&String> = fields.keys().collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

/// Where a model spells what must come in another way than its tokenizer, all that comes behind may differ. One that was taught to
/// write such answers does not.
#[test]
fn a_model_that_was_taught_to_writes_the_same_whether_it_may_spell_otherwise_or_not() {
    let engine = common::start(&common::ember(), roomy());
    let compiler = GrammarCompiler::new(engine.tokenizer(), &engine.model().eos).unwrap();
    let tasks = extractions(&engine);
    let asked = |prompt: &[TokenId], constraint: Constraint| {
        let sampling = SamplingParams { temperature: 0.0, constraint: Some(constraint), ..SamplingParams::default() };
        let stop = StopParams { max_tokens: 200, ..StopParams::default() };
        Request { prompt: prompt.to_vec(), sampling, stop, ..Request::default() }
    };
    let pairs = tasks.iter().flat_map(|(prompt, expected)| {
        let (canonical, _) = compiler.compile(&GrammarSpec::Json(schema_of(expected))).unwrap();
        let anyhow = Constraint(Arc::new(Anyhow(canonical.clone())));
        [canonical, anyhow].map(|constraint| asked(prompt, constraint))
    });
    let found = told(&engine, pairs.collect());
    let (mut n_same, mut n_right) = (0, [0, 0]);
    for (texts, (_, expected)) in found.chunks_exact(2).zip(&tasks) {
        n_same += usize::from(texts[0].text == texts[1].text);
        for (right, told) in n_right.iter_mut().zip(texts) {
            *right += usize::from(serde_json::from_str::<Value>(&told.text).unwrap() == *expected);
        }
    }
    println!("{n_same} of {} texts are the same; {n_right:?} are right", tasks.len());
    assert_eq!((n_same, n_right[0]), (tasks.len(), n_right[1]));
}
