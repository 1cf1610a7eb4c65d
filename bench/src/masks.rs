//! What grammars cost: the masks of a large vocabulary by themselves, and what a step with constrained requests takes longer than
//! one without. The model is a clock: a step takes a fixed time, and what constrained requests "draw" is a text that their schema
//! allows, token by token. Which tokens come before a draw the engine decides, where it knows them ahead: the clock goes on behind their bytes.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    fs,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};
use stoker_agent::answer::{CallFormat, CallableFunction, CallsWanted, Reading, answer_grammar};
use stoker_engine::{
    EmbeddingForm, Engine, EngineHandle, EngineLimits, EngineParts, FinishReason, GenerationDefaults, MemoryBudget,
    MemoryNeeds, MemoryPlan, ModelInfo, Request, RequestEvent, RequestId, SamplingParams, StepSizes, StopParams,
    TokenId, Tokenizer,
    constraint::{Constraint, Masks, allows, mask_words},
    exec::{ExecError, Executor},
    grammar::{GrammarCompiler, GrammarSpec},
    sched::{SampleSpec, Sampled, Step, StepOutput},
};

use crate::constrained::AnySpelling;

/// A token of the clock's own.
const FREE: TokenId = 2000;
const CONTEXT: u32 = 4096;
/// What free requests have for a seed, and constrained ones have not.
const FREE_SEED: u64 = u64::MAX;

/// How a bench is run.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Constrained requests beside the free one.
    pub n_constrained: usize,
    /// What a step takes by itself.
    pub step: Duration,
    /// Tokens that the free request gets.
    pub n_tokens: u32,
    /// Steps that the clock takes at once: 1 as on a CPU, 2 as on a GPU.
    pub steps_in_flight: usize,
}

/// A language with a text of it.
struct Sample {
    name: &'static str,
    grammar: Constraint,
    text: String,
    /// The text in tokens.
    tokens: Vec<TokenId>,
}

/// Times in microseconds.
#[derive(Debug)]
pub struct Spread {
    /// Of what.
    pub name: String,
    /// Sorted.
    us: Vec<f64>,
}

impl Spread {
    pub(crate) fn new(name: impl Into<String>, times: impl IntoIterator<Item = Duration>) -> Self {
        let mut us: Vec<f64> = times.into_iter().map(|time| time.as_secs_f64() * 1e6).collect();
        us.sort_by(f64::total_cmp);
        Self { name: name.into(), us }
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let at = |share: f64| self.us[((self.us.len() - 1) as f64 * share) as usize];
        let [p50, p99, most] = [0.5, 0.99, 1.0].map(at);
        write!(out, "{:34} {:7} {p50:9.1} {p99:9.1} {most:9.1}", self.name, self.us.len())
    }
}

/// A vocabulary, and what is written in it.
pub struct Bench {
    tokenizer: Vec<u8>,
    end: TokenId,
    vocab_size: usize,
    samples: Vec<Sample>,
}

impl Bench {
    /// Reads a `tokenizer.json` whose end token is `</s>`, and compiles every grammar over it.
    pub fn open(path: &Path) -> Result<Self> {
        let json = fs::read(path).with_context(|| format!("read {}", path.display()))?;
        let tokenizer = Tokenizer::from_json(&json)?;
        let end = tokenizer.token_id("</s>").context("the vocabulary has no </s>")?;
        let compiler = GrammarCompiler::new(&Arc::new(Tokenizer::from_json(&json)?), &[end])?;
        let words = Words::of(&tokenizer);
        let sample = |(name, spec, text): (_, GrammarSpec, String)| -> Result<Sample> {
            let (grammar, _) = compiler.compile(&spec).with_context(|| format!("compile {name}"))?;
            let grammar = Constraint(Arc::new(AnySpelling(grammar)));
            Ok(Sample { name, grammar, tokens: words.encode(&text)?, text })
        };
        let written = |mark: &str| tokenizer.token_id(mark).filter(|token| tokenizer.is_special(*token));
        let languages = languages().into_iter().chain([strict_tools(&written)?]);
        let samples = languages.map(sample).collect::<Result<_>>()?;
        Ok(Self { vocab_size: tokenizer.n_ids(), tokenizer: json, end, samples })
    }

    /// Time of each mask on the way through a language's text, and of taking each token in.
    pub fn masks(&self, rounds: usize) -> Result<Vec<Spread>> {
        let (mut spreads, mut all) = (Vec::new(), Vec::new());
        for sample in &self.samples {
            let mut times = Vec::new();
            for _ in 0..rounds {
                times.extend(self.walk(sample)?);
            }
            all.extend(&times);
            spreads.push(Spread::new(sample.name, times));
        }
        spreads.push(Spread::new("all masks", all));
        Ok(spreads)
    }

    fn walk(&self, sample: &Sample) -> Result<Vec<Duration>> {
        let mut matcher = sample.grammar.0.matcher();
        let mut mask = vec![0; mask_words(self.vocab_size)];
        let mut times = Vec::with_capacity(sample.tokens.len());
        for token in sample.tokens.iter().chain([&self.end]) {
            let began = Instant::now();
            mask.fill(0);
            matcher.allow(&mut mask).map_err(|reason| anyhow!("{}: {reason}", sample.name))?;
            times.push(began.elapsed());
            ensure!(allows(&mask, *token), "{}: its text is of the language", sample.name);
            if *token != self.end {
                matcher.accept(*token).map_err(|reason| anyhow!("{}: {reason}", sample.name))?;
            }
        }
        Ok(times)
    }

    /// By how much each step of the free request was longer than a step takes.
    pub fn steps(&self, load: Load) -> Result<Spread> {
        let over = Arc::new(Mutex::new(Vec::new()));
        let engine = self.start(load, Arc::clone(&over))?;
        let free = engine.submit(self.request(FREE_SEED, load.n_tokens, None))?;
        let is_over = Arc::new(AtomicBool::new(false));
        let readers: Vec<_> = (0..load.n_constrained).map(|n| self.keep_asking(&engine, n, &is_over)).collect();
        let reason = finish(free)?;
        ensure!(reason == FinishReason::Length, "the free request ended with {reason:?}");
        is_over.store(true, Ordering::Relaxed);
        engine.abort_all("the bench is over");
        for reader in readers {
            reader.join().map_err(|_| anyhow!("a reader panicked"))??;
        }
        let over = over.lock().map_err(|_| anyhow!("the clock panicked"))?;
        let longer = over.windows(2).map(|two| (two[1] - two[0]).saturating_sub(load.step));
        let Load { n_constrained, steps_in_flight, .. } = load;
        Ok(Spread::new(format!("step beside {n_constrained}, {steps_in_flight} in flight"), longer))
    }

    /// One constrained request behind the other until the bench is over.
    fn keep_asking(
        &self,
        engine: &EngineHandle,
        n: usize,
        is_over: &Arc<AtomicBool>,
    ) -> thread::JoinHandle<Result<()>> {
        let idx = n % self.samples.len();
        let request = self.request(idx as u64, CONTEXT / 2, Some(self.samples[idx].grammar.clone()));
        let (engine, is_over) = (engine.clone(), Arc::clone(is_over));
        thread::spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                match finish(engine.submit(request.clone())?)? {
                    FinishReason::Unfollowed(reason) | FinishReason::Error(reason)
                        if !is_over.load(Ordering::Relaxed) =>
                    {
                        bail!("{reason}")
                    }
                    _ => {}
                }
            }
            Ok(())
        })
    }

    fn request(&self, seed: u64, max_tokens: u32, constraint: Option<Constraint>) -> Request {
        let sampling = SamplingParams { seed, constraint, ..SamplingParams::default() };
        let stop = StopParams { max_tokens, ..StopParams::default() };
        Request { prompt: vec![FREE; 8], sampling, stop, ..Request::default() }
    }

    fn start(&self, load: Load, over: Arc<Mutex<Vec<Instant>>>) -> Result<EngineHandle> {
        let limits = EngineLimits { kv_cache_tokens: Some(64 * CONTEXT), ..EngineLimits::default() };
        let sched = limits.validate(CONTEXT, &[self.end], StepSizes::CPU)?;
        let needs = MemoryNeeds { weights_bytes: 0, workspace_bytes: 0, kv_bytes_per_token: 1 };
        let model = ModelInfo {
            architecture: "Clock".into(),
            n_params: 0,
            dtype: "none".into(),
            held: BTreeMap::new(),
            max_model_len: CONTEXT,
            max_num_seqs: sched.max_num_seqs as u32,
            vocab_size: self.vocab_size as u32,
            hidden_size: 1,
            eos: vec![self.end],
            memory: MemoryPlan::new(needs, limits.cache_use(&sched), MemoryBudget::host(u32::MAX.into()))?,
            defaults: GenerationDefaults::default(),
            embedding: EmbeddingForm::default(),
            relevance: None,
            chat_template: None,
            bos_token: None,
            eos_token: None,
            device: "clock".into(),
        };
        let tokenizer = Tokenizer::from_json(&self.tokenizer)?;
        let scribe = Scribe {
            words: Words::of(&tokenizer),
            texts: self.samples.iter().map(|sample| sample.text.clone()).collect(),
            end: self.end,
        };
        let clock = Clock { load, scribe, in_flight: VecDeque::new(), newest: HashMap::new(), over };
        Ok(Engine::start_with(Box::new(clock), EngineParts { model, tokenizer, sched, max_waiting: 64 }))
    }
}

fn finish(mut stream: stoker_engine::RequestStream) -> Result<FinishReason> {
    loop {
        if let RequestEvent::Finished { reason, .. } = stream.blocking_next().context("a terminal comes")? {
            return Ok(reason);
        }
    }
}

/// The tokens of a vocabulary by what they stand for.
#[derive(Debug)]
pub(crate) struct Words {
    ids: HashMap<Vec<u8>, TokenId>,
    /// What each token stands for, by its id.
    bytes: HashMap<TokenId, Vec<u8>>,
    longest: usize,
}

impl Words {
    pub(crate) fn of(tokenizer: &Tokenizer) -> Self {
        let plain = (0..tokenizer.n_ids() as TokenId).filter(|id| !tokenizer.is_special(*id));
        let ids: HashMap<_, _> = plain.map(|id| (tokenizer.token_bytes(id), id)).collect();
        let longest = ids.keys().map(Vec::len).max().unwrap_or(0);
        let bytes = ids.iter().map(|(bytes, id)| (*id, bytes.clone())).collect();
        Self { ids, bytes, longest }
    }

    /// What a token stands for.
    pub(crate) fn bytes(&self, token: TokenId) -> Option<&[u8]> {
        self.bytes.get(&token).map(Vec::as_slice)
    }

    pub(crate) fn encode(&self, text: &str) -> Result<Vec<TokenId>> {
        let (mut rest, mut tokens) = (text.as_bytes(), Vec::new());
        while !rest.is_empty() {
            let token = self.first(rest).with_context(|| format!("no token begins {text:?}"))?;
            tokens.push(token);
            rest = &rest[self.bytes[&token].len()..];
        }
        Ok(tokens)
    }

    /// The longest token that a text begins with.
    fn first(&self, text: &[u8]) -> Option<TokenId> {
        let longest = self.longest.min(text.len());
        (1..=longest).rev().find_map(|n| self.ids.get(&text[..n]).copied())
    }
}

/// Writes texts.
struct Scribe {
    words: Words,
    texts: Vec<String>,
    end: TokenId,
}

impl Scribe {
    /// The longest token that goes on behind what is written of a text; the end token behind all of it. `None`: that is no beginning
    /// of it.
    fn next(&self, text: usize, written: &[TokenId]) -> Option<TokenId> {
        let mut rest = self.texts[text].as_bytes();
        for token in written {
            // A step may be on its way when the one before it turns out to have been the last.
            if *token == self.end {
                return Some(self.end);
            }
            rest = rest.strip_prefix(self.words.bytes(*token)?)?;
        }
        match rest.is_empty() {
            true => Some(self.end),
            false => self.words.first(rest),
        }
    }
}

/// Computes nothing, in a given time; draws the next token of a text.
struct Clock {
    load: Load,
    scribe: Scribe,
    in_flight: VecDeque<Ticking>,
    /// The newest token of each constrained request, where it was drawn in the step before.
    newest: HashMap<RequestId, TokenId>,
    /// When steps were over in which the free request had a token.
    over: Arc<Mutex<Vec<Instant>>>,
}

struct Ticking {
    drawn: Vec<TokenId>,
    constrained: Vec<Constrained>,
    over_at: Instant,
    has_free: bool,
}

/// A draw that waits for its mask.
struct Constrained {
    id: RequestId,
    /// Which of the step's draws.
    entry: usize,
    text: usize,
    /// What comes before it, but for a token that was in flight.
    written: Vec<TokenId>,
    is_one_in_flight: bool,
}

impl Constrained {
    fn of(id: RequestId, entry: usize, spec: &SampleSpec<'_>) -> Self {
        Self {
            id,
            entry,
            text: spec.request.sampling.seed as usize,
            written: spec.history[spec.request.prompt.len()..].to_vec(),
            is_one_in_flight: spec.history.len() < spec.position,
        }
    }
}

impl Executor for Clock {
    fn max_steps_in_flight(&self) -> usize {
        self.load.steps_in_flight
    }

    /// As on a CPU, where a step is over when it is launched, or as on a device that works on its own.
    fn launch(&mut self, step: &Step<'_>) -> Result<(), ExecError> {
        let now = Instant::now();
        let begins_at = self.in_flight.back().map_or(now, |last| last.over_at.max(now));
        let over_at = begins_at + self.load.step;
        let specs: Vec<_> = step.chunks.iter().filter_map(|chunk| Some((chunk.id, chunk.sample?))).collect();
        let constrained = specs.iter().enumerate().filter(|(_, (_, spec))| spec.is_constrained());
        let constrained = constrained.map(|(entry, (id, spec))| Constrained::of(*id, entry, spec)).collect();
        let has_free = specs.iter().any(|(_, spec)| spec.request.sampling.seed == FREE_SEED);
        self.in_flight.push_back(Ticking { drawn: vec![FREE; specs.len()], constrained, over_at, has_free });
        if self.load.steps_in_flight == 1 {
            thread::sleep(over_at.saturating_duration_since(Instant::now()));
        }
        Ok(())
    }

    /// A draw that its mask forbids was given up for tokens that must come, and goes nowhere. Were it a mask that went astray, what
    /// comes behind it would not be the beginning of the text.
    fn constrain(&mut self, masks: Masks<'_>) -> Result<(), ExecError> {
        let before = std::mem::take(&mut self.newest);
        let Ticking { drawn, constrained, .. } = self.in_flight.back_mut().expect("a step was launched");
        for (draw, mask) in constrained.iter_mut().zip(masks.iter()) {
            let Constrained { id, entry, text, written, is_one_in_flight } = draw;
            if *is_one_in_flight {
                written.extend(before.get(id));
            }
            let next = self.scribe.next(*text, written);
            let next = next.ok_or_else(|| ExecError(format!("text {text} does not begin with {written:?}")))?;
            drawn[*entry] = if allows(mask, next) { next } else { FREE };
            self.newest.insert(*id, drawn[*entry]);
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<StepOutput, ExecError> {
        let Ticking { drawn, over_at, has_free, .. } = self.in_flight.pop_front().expect("a step was launched");
        thread::sleep(over_at.saturating_duration_since(Instant::now()));
        if has_free {
            self.over.lock().expect("nothing panics under this lock").push(Instant::now());
        }
        let sampled = drawn.into_iter().map(|token| Sampled::Token { token, logprobs: None });
        Ok(StepOutput { sampled: sampled.collect() })
    }
}

/// Languages as applications ask for them, each with a text of it.
fn languages() -> Vec<(&'static str, GrammarSpec, String)> {
    let text = |value: &Value| serde_json::to_string_pretty(value).expect("JSON is text");
    let prose = "The quick brown fox, who had seen \"better\" days, jumps over 13 lazy dogs near Zürich. ".repeat(6);
    let name = json!({"type": "string", "minLength": 1, "maxLength": 80});
    let flat = json!({"type": "object", "properties": {"name": name, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "member": {"type": "boolean"}, "email": {"type": "string", "format": "email"}},
        "required": ["name", "age", "member", "email"], "additionalProperties": false});
    let person = json!({"name": "Ada Lovelace-Byron", "age": 36, "member": true, "email": "ada.lovelace@example.org"});
    let order = json!({"type": "object", "properties": {"id": {"type": "string", "format": "uuid"}, "at": {"type": "string", "format": "date-time"},
        "lines": {"type": "array", "maxItems": 50, "items": {"type": "object", "properties": {"sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
            "count": {"type": "integer"}, "price": {"type": "number"}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
            "required": ["sku", "count", "price"]}}}, "required": ["id", "at", "lines"]});
    let line = |n: u32| json!({"sku": format!("ABC-{:04}", n * 37), "count": n, "price": f64::from(n) * 1.25, "note": "by noon, please"});
    let ordered = json!({"id": "6f1c1c3e-0f0b-4f0a-9d1e-2b7f6a1c9e11", "at": "2026-11-22T19:50:00Z", "lines": (1..8).map(line).collect::<Vec<_>>()});
    let codes: Vec<String> = (0..500).map(|n| format!("code-{:03}-{}", n, n * 7919 % 1000)).collect();
    let picked = json!({"codes": [&codes[3], &codes[250], &codes[499], &codes[77]]});
    let of_codes = json!({"type": "object", "properties": {"codes": {"type": "array", "items": {"enum": codes}}}, "required": ["codes"]});
    let tree = json!({"type": "object", "properties": {"root": {"$ref": "#/$defs/node"}}, "required": ["root"], "$defs": {"node":
        {"type": "object", "properties": {"label": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        "required": ["label", "children"]}}});
    let leaf = |n: u32| json!({"label": format!("leaf {n}"), "children": []});
    let grown = json!({"root": {"label": "top", "children": [leaf(1), {"label": "branch", "children": [leaf(2), leaf(3)]}, leaf(4)]}});
    let free = json!({"summary": prose, "tags": ["fox", "dog", "élan"], "score": -12.5e3, "nested": {"any": [1, null, false]}});
    vec![
        ("flat object", GrammarSpec::Json(flat), text(&person)),
        ("objects in an array, formats", GrammarSpec::Json(order), text(&ordered)),
        ("enum of 500", GrammarSpec::Json(of_codes), text(&picked)),
        ("recursive schema", GrammarSpec::Json(tree), text(&grown)),
        ("any JSON object", GrammarSpec::json_object(), text(&free)),
        (
            "regular expression",
            GrammarSpec::Regex(r"(https?://[a-z0-9.-]{1,60}(/[A-Za-z0-9_-]{1,30}){0,8},? ?){1,20}".into()),
            "https://docs.example.org/guide/Getting_started/part-2, http://a.example.com/x/y/z".into(),
        ),
        (
            "choice of 100",
            GrammarSpec::Choice((0..100).map(|n| format!("answer number {n}")).collect()),
            "answer number 42".into(),
        ),
    ]
}

/// An answer that may call tools, which are strict, as an agent compiles it for `tool_choice: auto`.
fn strict_tools(special: &dyn Fn(&str) -> Option<TokenId>) -> Result<(&'static str, GrammarSpec, String)> {
    let function = |name: &str, parameters| CallableFunction {
        name: name.into(),
        parameters,
        is_strict: true,
        param: "tools".into(),
    };
    let weather = json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["celsius", "fahrenheit"]}}, "required": ["city", "days", "unit"], "additionalProperties": false});
    let mail = json!({"type": "object", "properties": {"to": {"type": "string", "format": "email"}, "text": {"type": "string"}},
        "required": ["to", "text"], "additionalProperties": false});
    let calls = CallsWanted {
        functions: vec![function("weather_of", weather), function("send_mail", mail)],
        are_parallel: true,
        ..CallsWanted::default()
    };
    let reading = Reading { calls: Some(CallFormat::Hermes), ..Reading::default() };
    let grammar = answer_grammar(&reading, &calls, None, special).context("strict tools are held to a grammar")?;
    let call = |name: &str, arguments: Value| {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
    };
    let spoken = "Let me see what the sky over Oslo has in store: a < b, {x} and [a](b), as \"usual\".\n".repeat(5);
    let mail = json!({"to": "ada.lovelace@example.org", "text": "It rains, bring a coat."});
    let calls = [call("weather_of", json!({"city": "Oslo", "days": 3, "unit": "celsius"})), call("send_mail", mail)];
    Ok(("strict tools, choice auto", grammar.spec, format!("{spoken}{}\n{}", calls[0], calls[1])))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// ember's vocabulary, with an end token named as the bench wants it: there are tokens that its tokenizer makes otherwise than the
    /// longest first, and texts that are forced.
    #[test]
    fn steps_go_on_behind_tokens_that_were_known_ahead() {
        let ember = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember/tokenizer.json");
        let named = fs::read_to_string(ember).unwrap().replace("<|end|>", "</s>");
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(named.as_bytes()).unwrap();
        let bench = Bench::open(file.path()).unwrap();
        for steps_in_flight in [1, 2] {
            let load = Load { n_constrained: 8, step: Duration::from_millis(1), n_tokens: 200, steps_in_flight };
            assert!(!bench.steps(load).unwrap().us.is_empty());
        }
    }
}
