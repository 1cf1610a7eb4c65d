//! What a format costs in answers: a model of ember's chat format beside the one that it was made of, on held-out conversations. Answers are
//! asked for greedily, all at once, as clients would; probabilities are of the tokens of the right answers, behind their prompts.

use std::{fs, path::Path};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use stoker_engine::{
    DeviceChoice, Engine, EngineConfig, EngineLimits, FinishReason, LoadedModel, ModelFiles, Request, RequestEvent,
    SamplingParams, StopParams, TokenId, Tokenizer, exec::cuda::CudaModel,
};

use crate::reading::Reading;

/// Ends what is said.
const END: &str = "<|end|>";
/// The longest right answer is shorter.
const ANSWER_TOKENS: u32 = 200;
/// Requests at once.
const AT_ONCE: u32 = 256;
/// Tokens of a step when probabilities are asked for.
const CHUNK: usize = 64;

/// What is compared.
#[derive(Clone, Debug)]
pub struct Subject<'a> {
    /// The model that the other was made of.
    pub original: &'a Path,
    /// The model, or the same one again.
    pub model: &'a Path,
    /// Lines with `messages` and the `expected` answer; those with tools are left out.
    pub heldout: &'a Path,
    /// How the model is run; of the original only what computes is the same.
    pub limits: EngineLimits,
    /// What computes.
    pub device: DeviceChoice,
}

/// A conversation in tokens.
struct Case {
    prompt: Vec<TokenId>,
    answer: Vec<TokenId>,
    expected: String,
}

/// `exact_match` in percent of the answers, of the original too, `perplexity` and `kl` (nats) a token of the right answers, and how many
/// answers there are.
pub fn measure(subject: &Subject<'_>) -> Result<(Vec<Reading>, usize)> {
    let plain = EngineLimits { quantization: None, kv_cache_dtype: None, ..subject.limits.clone() };
    let wanted = Probabilities::of(subject, subject.original, &plain, None)?;
    let found = Probabilities::of(subject, subject.model, &subject.limits, Some(&wanted))?;
    let (right, n_answers) = right_answers(subject, &found.cases)?;
    let n_tokens = found.n_tokens as f64;
    let readings = vec![
        Reading::new("exact_match", 100.0 * right as f64 / n_answers as f64),
        Reading::new("perplexity", (found.surprise / n_tokens).exp()),
        Reading::new("kl", found.divergence / n_tokens),
    ];
    Ok((readings, n_answers))
}

/// What a model thinks of right answers.
struct Probabilities {
    cases: Vec<Case>,
    /// Logarithms, of every token of every answer; empty where another's were there to compare with.
    rows: Vec<Vec<f32>>,
    n_tokens: usize,
    surprise: f64,
    divergence: f64,
}

impl Probabilities {
    fn of(subject: &Subject<'_>, model: &Path, limits: &EngineLimits, original: Option<&Self>) -> Result<Self> {
        let mut reader = Reader::open(subject, model, limits)?;
        let cases = read_cases(subject.heldout, reader.tokenizer())?;
        let mut found = Self { cases: Vec::new(), rows: Vec::new(), n_tokens: 0, surprise: 0.0, divergence: 0.0 };
        for case in &cases {
            let tokens = [&case.prompt[..], &case.answer].concat();
            let rows = reader.logits(&tokens)?;
            // A row is behind its token.
            for (row, token) in rows[case.prompt.len() - 1..].iter().zip(&case.answer) {
                let row = log_probabilities(row);
                found.surprise -= f64::from(row[*token as usize]);
                match original {
                    Some(original) => found.divergence += divergence(&original.rows[found.n_tokens], &row),
                    None => found.rows.push(row),
                }
                found.n_tokens += 1;
            }
        }
        Ok(Self { cases, ..found })
    }
}

/// A model that is shown tokens.
enum Reader {
    Cpu(Box<LoadedModel>),
    Gpu(Box<CudaModel>),
}

impl Reader {
    fn open(subject: &Subject<'_>, model: &Path, limits: &EngineLimits) -> Result<Self> {
        let limits = EngineLimits { max_num_seqs: Some(CHUNK as u32), ..limits.clone() };
        let config = EngineConfig { model: ModelFiles::Directory(model.to_owned()), limits, device: subject.device };
        let opened = || -> Result<Self> {
            Ok(match subject.device {
                DeviceChoice::Cuda(ordinal) => Self::Gpu(Box::new(CudaModel::open(&config, ordinal, &|_| {})?)),
                DeviceChoice::Auto | DeviceChoice::Cpu => Self::Cpu(Box::new(LoadedModel::open(&config, &|_| {})?)),
            })
        };
        opened().with_context(|| format!("open {}", model.display()))
    }

    fn tokenizer(&self) -> &Tokenizer {
        match self {
            Self::Cpu(model) => &model.parts.tokenizer,
            Self::Gpu(model) => &model.parts.tokenizer,
        }
    }

    fn logits(&mut self, tokens: &[TokenId]) -> Result<Vec<Vec<f32>>> {
        match self {
            Self::Cpu(model) => Ok(model.executor.teacher_forced_logits(tokens, CHUNK)),
            Self::Gpu(model) => Ok(model.executor.teacher_forced_logits(tokens, CHUNK)?),
        }
    }
}

fn read_cases(path: &Path, tokenizer: &Tokenizer) -> Result<Vec<Case>> {
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let mut cases = Vec::new();
    for (idx, line) in text.lines().enumerate() {
        let case: Value = serde_json::from_str(line).with_context(|| format!("{}:{}", path.display(), idx + 1))?;
        if case["tools"].is_null() {
            cases.push(Case::of(&case, tokenizer).with_context(|| format!("{}:{}", path.display(), idx + 1))?);
        }
    }
    ensure!(!cases.is_empty(), "{} holds no conversation without tools", path.display());
    Ok(cases)
}

impl Case {
    fn of(case: &Value, tokenizer: &Tokenizer) -> Result<Self> {
        let said = |message: &Value| {
            let word = |field: &str| message[field].as_str().map(str::to_owned).context("a message is text of a role");
            Ok(format!("<|{}|>{}{END}", word("role")?, word("content")?))
        };
        let messages = case["messages"].as_array().context("messages are a list")?;
        let messages = messages.iter().map(said).collect::<Result<String>>()?;
        let expected = case["expected"].as_str().context("there is an expected answer")?.to_owned();
        Ok(Self {
            prompt: tokenizer.encode(&format!("<|begin|>{messages}<|assistant|>"), false)?,
            answer: tokenizer.encode(&format!("{expected}{END}"), false)?,
            expected,
        })
    }
}

fn log_probabilities(logits: &[f32]) -> Vec<f32> {
    let most = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - most).exp()).sum();
    let sum = most + sum.ln();
    logits.iter().map(|logit| (f64::from(*logit) - sum) as f32).collect()
}

/// Of `found` from `wanted`, in nats.
fn divergence(wanted: &[f32], found: &[f32]) -> f64 {
    wanted.iter().zip(found).map(|(p, q)| f64::from(p.exp()) * f64::from(p - q)).sum()
}

fn right_answers(subject: &Subject<'_>, cases: &[Case]) -> Result<(usize, usize)> {
    let limits =
        EngineLimits { max_num_seqs: Some(AT_ONCE), max_waiting: cases.len() as u32, ..subject.limits.clone() };
    let model = ModelFiles::Directory(subject.model.to_owned());
    let engine = Engine::start(EngineConfig { model, limits, device: subject.device }, |_| {})?;
    let ask = |case: &Case| {
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let stop = StopParams { max_tokens: ANSWER_TOKENS, ..StopParams::default() };
        engine.submit(Request { prompt: case.prompt.clone(), sampling, stop, ..Request::default() })
    };
    let streams: Vec<_> = cases.iter().map(ask).collect::<Result<_, _>>()?;
    let mut right = 0;
    for (mut stream, case) in streams.into_iter().zip(cases) {
        let mut answer = String::new();
        loop {
            match stream.blocking_next().context("a stream ends with a terminal")? {
                RequestEvent::Delta { text, .. } => answer.push_str(&text),
                RequestEvent::Finished { reason: FinishReason::Stop | FinishReason::Length, .. } => break,
                other => bail!("an answer ended with {other:?}"),
            }
        }
        right += usize::from(answer.trim() == case.expected.trim());
    }
    Ok((right, cases.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ember_beside_itself_loses_nothing() {
        let ember = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember");
        let lines = fs::read_to_string(ember.join("eval/heldout.jsonl")).unwrap();
        let heldout = tempfile::NamedTempFile::new().unwrap();
        let few: Vec<&str> = lines.lines().step_by(70).collect();
        fs::write(heldout.path(), few.join("\n")).unwrap();
        let subject = Subject {
            original: &ember,
            model: &ember,
            heldout: heldout.path(),
            limits: EngineLimits::default(),
            device: DeviceChoice::Cpu,
        };
        let (readings, n_answers) = measure(&subject).unwrap();
        assert!(n_answers > 5, "{n_answers}");
        let value = |metric| readings.iter().find(|reading| reading.metric == metric).unwrap().value;
        assert!(value("exact_match") >= 90.0 && value("perplexity") < 1.2, "{readings:?}");
        assert_eq!(value("kl"), 0.0);
    }

    #[test]
    fn a_divergence_is_none_of_equals_and_positive_of_others() {
        let [even, odd] = [[0.0, 0.0], [1.0, -1.0]].map(|logits: [f32; 2]| log_probabilities(&logits));
        assert_eq!(divergence(&even, &even), 0.0);
        // ln 2 of surprise less is what cosh 1 is more.
        assert!((divergence(&even, &odd) - 1f64.cosh().ln()).abs() < 1e-6);
    }
}
