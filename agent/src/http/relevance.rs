//! How well texts answer others, as the model compares them: pairs become prompts or vectors, and these scores. Shared by `/score` and
//! `/rerank`; knows the wire form of neither.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use futures::{StreamExt, TryStreamExt, stream};
use jiff::Zoned;
use minijinja::{Value, value::Serde};
use serde::Deserialize;
use stoker_engine::{
    FinishReason, LogitScore, PositionLogprobs, RejectReason, Relevance, Request, RequestEvent, SamplingParams,
    StopParams, TokenId, constraint::Constraint, token_filter::TokenFilter,
};

use crate::{
    chat_template::{Conversation, Message, PromptEnd},
    http::{
        embeddings,
        error::ApiError,
        extract::Arrival,
        fields::Fields,
        generate::{self, AddSpecials, Encoding},
        neutral::{neutral, take_all},
        params::{Standing, Truncation, truncation},
        prompt_work,
        stream::{has_failed, stopped},
    },
    replica::Served,
};

/// Pairs of one request.
const MAX_PAIRS: usize = 2048;
/// Pairs of one request that the engine has at a time, as texts of embeddings.
const AT_ONCE: usize = 16;

/// A text, as rerank APIs take it.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string or an object with `text`: only text is compared")]
pub(crate) enum WireText {
    Bare(String),
    Object(TextObject),
}

/// As Jina's API has it. Read as a map: serde takes an array for a struct, too.
#[derive(Deserialize)]
#[serde(try_from = "BTreeMap<TextKey, String>")]
pub(crate) struct TextObject {
    text: String,
}

#[derive(Deserialize, Eq, Ord, PartialEq, PartialOrd)]
#[serde(rename_all = "lowercase")]
enum TextKey {
    Text,
}

impl TryFrom<BTreeMap<TextKey, String>> for TextObject {
    type Error = &'static str;

    fn try_from(mut members: BTreeMap<TextKey, String>) -> Result<Self, Self::Error> {
        members.remove(&TextKey::Text).map(|text| Self { text }).ok_or("it has no `text`")
    }
}

/// One or several of them.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a string, an object with `text`, or an array of them: only text is compared")]
pub(crate) enum WireTexts {
    One(WireText),
    Many(Vec<WireText>),
}

impl WireText {
    /// The text itself.
    pub(crate) fn into_text(self) -> String {
        match self {
            Self::Bare(text) | Self::Object(TextObject { text }) => text,
        }
    }
}

impl WireTexts {
    /// The texts themselves.
    pub(crate) fn into_texts(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text.into_text()],
            Self::Many(texts) => texts.into_iter().map(WireText::into_text).collect(),
        }
    }
}

/// Some texts of a request, and what its client calls them.
pub(crate) struct Side {
    pub(crate) field: &'static str,
    pub(crate) texts: Vec<String>,
}

/// What is compared: the one query with each document, or the texts of both sides in their order.
pub(crate) struct Pairs {
    queries: Side,
    documents: Side,
}

impl Pairs {
    /// Checks that both sides go together.
    pub(crate) fn new(queries: Side, documents: Side) -> Result<Self, ApiError> {
        for Side { field, texts } in [&queries, &documents] {
            if texts.is_empty() {
                return Err(ApiError::empty_array(*field, format!("`{field}` is empty: send at least one text")));
            }
            if texts.len() > MAX_PAIRS {
                let n_texts = texts.len();
                let message =
                    format!("`{field}` has {n_texts} texts, at most {MAX_PAIRS} are compared at once: send fewer");
                return Err(ApiError::invalid(*field, message));
            }
        }
        let (n_queries, n_documents) = (queries.texts.len(), documents.texts.len());
        let field = documents.field;
        if n_queries != 1 && n_queries != n_documents {
            let first = queries.field;
            let message = format!(
                "`{first}` has {n_queries} texts and `{field}` has {n_documents}: send one `{first}` for all, or as many"
            );
            return Err(ApiError::invalid(field, message));
        }
        Ok(Self { queries, documents })
    }

    /// The texts of the second side.
    pub(crate) fn documents(&self) -> &[String] {
        &self.documents.texts
    }

    fn query(&self, idx: usize) -> &str {
        let queries = &self.queries.texts;
        &queries[if queries.len() == 1 { 0 } else { idx }]
    }
}

/// Scores, one a pair, and tokens that were read for them.
pub(crate) struct Scores {
    pub(crate) of_pairs: Vec<f64>,
    pub(crate) prompt_tokens: usize,
}

/// What a request says beside its texts.
pub(crate) struct Comparison {
    standing: Standing,
    /// What matching means.
    instruction: Option<String>,
    /// Variables of the chat template.
    variables: BTreeMap<String, Value>,
    truncate: Option<Truncation>,
    /// Tokens of a query and of a document that are read.
    most_tokens: [Option<usize>; 2],
    /// Whether scores go through the model's activation.
    is_activated: bool,
}

impl Comparison {
    /// Takes all that is not a text.
    pub(crate) fn take(fields: &mut Fields, open: &Arrival) -> Result<Self, ApiError> {
        let most = |fields: &mut Fields, field| -> Result<Option<usize>, ApiError> {
            let most = fields.number(field, 0..=u32::MAX)?;
            Ok(most.filter(|most| *most > 0).map(|most| most as usize))
        };
        take_all(fields, vec![neutral("mm_processor_kwargs", [serde_json::json!({})], "only text is compared")])?;
        fields.take::<String>("user")?;
        Ok(Self {
            standing: Standing::take(fields, open.passage.salt.as_ref(), Instant::now())?,
            instruction: fields.take("instruction")?,
            variables: fields.take("chat_template_kwargs")?.unwrap_or_default(),
            truncate: truncation(fields)?,
            most_tokens: [most(fields, "max_tokens_per_query")?, most(fields, "max_tokens_per_doc")?],
            is_activated: fields.take("use_activation")?.unwrap_or(true),
        })
    }

    /// Compares all pairs.
    pub(crate) async fn scores(self, served: &Arc<Served>, open: &Arrival, pairs: &Pairs) -> Result<Scores, ApiError> {
        match &served.engine.model().relevance {
            Some(Relevance::Logits(score)) => {
                let asking = Asking::new(self, served, score.clone())?;
                let each = (0..pairs.documents.texts.len()).map(|idx| asking.score(open, pairs, idx));
                let scored: Vec<(f64, usize)> = stream::iter(each).buffered(AT_ONCE).try_collect().await?;
                let prompt_tokens = scored.iter().map(|(_, n_tokens)| n_tokens).sum();
                Ok(Scores { of_pairs: scored.into_iter().map(|(score, _)| score).collect(), prompt_tokens })
            }
            Some(Relevance::Cosine) => self.cosines(served, open, pairs).await,
            None => {
                let message = "the model is no reranker and makes no embeddings: its files have no modules.json with \
                               LogitScore or Pooling, as sentence-transformers saves them";
                Err(ApiError::unsupported("model", message))
            }
        }
    }

    /// By embeddings: each text is computed once, whatever it is compared with.
    async fn cosines(self, served: &Arc<Served>, open: &Arrival, pairs: &Pairs) -> Result<Scores, ApiError> {
        if self.instruction.is_some() || !self.variables.is_empty() {
            let field = if self.instruction.is_some() { "instruction" } else { "chat_template_kwargs" };
            let message = format!("`{field}`: this model compares embeddings and reads no instruction: remove it");
            return Err(ApiError::unsupported(field, message));
        }
        let template = embeddings::request(served, self.standing.clone());
        let mut n_tokens = 0;
        let mut sides = Vec::new();
        for (side, most) in [(&pairs.queries, self.most_tokens[0]), (&pairs.documents, self.most_tokens[1])] {
            let of_side = move |error| of_field(side.field, error);
            let encoding = Encoding::new(AddSpecials::Yes, self.truncate);
            let texts = shortened(served, &side.texts, most).await.map_err(of_side)?;
            let mut prompts = generate::tokenize(served, texts, encoding).await.map_err(of_side)?;
            for prompt in &mut prompts {
                generate::keep(prompt, self.truncate, served.engine.model().max_model_len);
                n_tokens += prompt.len();
            }
            let vectors = prompts.into_iter().map(|prompt| {
                let vector = embeddings::vector_of(served, open, Request { prompt, ..template.clone() });
                async move { vector.await.map_err(of_side) }
            });
            sides.push(stream::iter(vectors).buffered(AT_ONCE).try_collect::<Vec<Vec<f32>>>().await?);
        }
        let of_query = |idx: usize| if sides[0].len() == 1 { &sides[0][0] } else { &sides[0][idx] };
        let of_pairs = sides[1].iter().enumerate().map(|(idx, document)| cosine(of_query(idx), document)).collect();
        Ok(Scores { of_pairs, prompt_tokens: n_tokens })
    }
}

/// A causal reranker, asked about pairs.
struct Asking<'a> {
    served: &'a Arc<Served>,
    score: LogitScore,
    comparison: Comparison,
    end: PromptEnd,
    now: Zoned,
}

impl<'a> Asking<'a> {
    fn new(mut comparison: Comparison, served: &'a Arc<Served>, score: LogitScore) -> Result<Self, ApiError> {
        if comparison.truncate.is_some() {
            let message = "`truncate_prompt_tokens` would cut the question that this model is asked: use \
                           `max_tokens_per_doc`";
            return Err(ApiError::unsupported("truncate_prompt_tokens", message));
        }
        let Some(template) = &served.template else {
            return Err(ApiError::unsupported("model", "this reranker has no chat template that would show it texts"));
        };
        if let Some(unread) = comparison.variables.keys().find(|name| !template.reads(name)) {
            let path = format!("chat_template_kwargs.{unread}");
            let message = format!("`{path}`: this model's chat template reads no variable of this name: remove it");
            return Err(ApiError::unsupported(path, message));
        }
        // Templates find it as a message or as a variable; those that read the one leave out the other.
        if let Some(instruction) = comparison.instruction.as_ref().filter(|_| template.reads("instruction")) {
            comparison.variables.entry("instruction".to_owned()).or_insert_with(|| Value::from(instruction.as_str()));
        }
        let mut own = score.template_variables.clone();
        let opens_turn = own.remove("add_generation_prompt").is_some_and(|opens| opens == true);
        for (name, value) in own {
            comparison.variables.entry(name).or_insert_with(|| Value::from(Serde(value)));
        }
        let end = if opens_turn { PromptEnd::AssistantsTurn } else { PromptEnd::LastMessage };
        Ok(Self { served, score, comparison, end, now: Zoned::now() })
    }

    /// A pair's score, and the tokens of its prompt.
    async fn score(&self, open: &Arrival, pairs: &Pairs, idx: usize) -> Result<(f64, usize), ApiError> {
        let field = pairs.documents.field;
        let [most_of_query, most_of_document] = self.comparison.most_tokens;
        let query = shortened(self.served, &[pairs.query(idx).to_owned()], most_of_query).await;
        let query = query.map_err(|error| of_field(pairs.queries.field, error))?.concat();
        let document = shortened(self.served, &pairs.documents.texts[idx..=idx], most_of_document).await;
        let prompt = async { self.prompt(query, document?.concat()).await };
        let prompt = prompt.await.map_err(|error| of_field(field, error))?;
        let n_tokens = prompt.len();
        let Standing { priority, deadline, cache_salt } = self.comparison.standing.clone();
        let asked = Request {
            prompt,
            priority,
            deadline,
            cache_salt,
            sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            // An end token is as good as any other here.
            stop: StopParams { max_tokens: 1, ignore_eos: true, ..StopParams::default() },
            logprobs: Some(0),
            ..Request::default()
        };
        let difference = self.difference(open, asked).await.map_err(|error| of_field(field, error))?;
        let activated = self.comparison.is_activated;
        Ok((if activated { self.score.activation.of(difference) } else { difference }, n_tokens))
    }

    async fn prompt(&self, query: String, document: String) -> Result<Vec<TokenId>, ApiError> {
        let instruction = self.comparison.instruction.clone().or_else(|| self.score.instruction.clone());
        let message = |role: &str, content: String| Message { role: role.into(), content, ..Message::default() };
        let mut messages: Vec<Message> = instruction.into_iter().map(|text| message("system", text)).collect();
        messages.extend([message("query", query), message("document", document)]);
        let (served, now, end) = (Arc::clone(self.served), self.now.clone(), self.end);
        let variables = self.comparison.variables.clone();
        let n_bytes = messages.iter().map(|message| message.content.len()).sum();
        let encoding = Encoding::new(AddSpecials::No, None);
        prompt_work::run(n_bytes, move |is_abandoned| {
            let contents: Vec<&str> = messages.iter().map(|message| message.content.as_str()).collect();
            generate::refuse_too_long(&served, &contents, encoding, is_abandoned)?;
            let conversation =
                Conversation { messages: &messages, tools: &[], documents: &[], end, variables: &variables, now };
            let template = served.template.as_ref().expect("checked before the first pair");
            let text =
                template.render(&conversation).map_err(|error| ApiError::invalid("prompt", error.to_string()))?;
            if let Some(lost) = messages.iter().find(|message| !text.contains(message.content.trim())) {
                let message = format!("this model's chat template leaves out what `{}` says", lost.role);
                return Err(ApiError::invalid("prompt", message));
            }
            generate::encode(&served, &text, encoding, is_abandoned)
        })
        .await
    }

    /// Of the logits of both tokens behind a prompt. Both lose the same to become log-probabilities.
    async fn difference(&self, open: &Arrival, asked: Request) -> Result<f64, ApiError> {
        let tokens = [self.score.true_token, self.score.false_token];
        let named = Request { logprob_tokens: tokens.to_vec(), ..asked.clone() };
        match self.served.engine.submit(named) {
            Ok(stream) => {
                let told = first(stream, open).await?;
                let of = |token| told.top.iter().find(|told| told.token == token).map(|told| f64::from(told.logprob));
                let [said, denied] = tokens.map(of);
                said.zip(denied)
                    .map(|(said, denied)| said - denied)
                    .ok_or_else(|| open.failed(&FinishReason::Error("it scored nothing".to_owned())))
            }
            // It tells of the token that it draws: each of them is drawn, the second behind a prompt that is in the cache.
            Err(RejectReason::NotOnThisDevice { .. }) => {
                let mut drawn = [0.0; 2];
                for (drawn, token) in drawn.iter_mut().zip(tokens) {
                    let stream = self.served.engine.submit(only(token, asked.clone()))?;
                    *drawn = f64::from(first(stream, open).await?.chosen.logprob);
                }
                Ok(drawn[0] - drawn[1])
            }
            Err(reason) => Err(reason.into()),
        }
    }
}

/// The same request with one token that may come.
fn only(token: TokenId, mut request: Request) -> Request {
    let filter = TokenFilter::new(&[token], Vec::new(), None);
    request.sampling.constraint = Some(Constraint(Arc::new(filter)));
    request
}

/// What is told of a request's first token.
async fn first(mut stream: stoker_engine::RequestStream, open: &Arrival) -> Result<PositionLogprobs, ApiError> {
    let mut told = None;
    while let Some(event) = stream.next().await {
        match event {
            RequestEvent::Delta { logprobs, .. } => told = told.or(logprobs.into_iter().next()),
            RequestEvent::Finished { reason, .. } if has_failed(&reason) => return Err(open.failed(&reason)),
            RequestEvent::Prompt(_) | RequestEvent::Embedding(_) | RequestEvent::Finished { .. } => {}
        }
    }
    open.device_time.add(stream.device_time());
    told.ok_or_else(|| open.failed(&stopped()))
}

/// Texts, each without what is beyond so many tokens.
async fn shortened(served: &Arc<Served>, texts: &[String], most: Option<usize>) -> Result<Vec<String>, ApiError> {
    let Some(most) = most else { return Ok(texts.to_vec()) };
    let (served, texts) = (Arc::clone(served), texts.to_vec());
    let n_bytes = texts.iter().map(String::len).sum();
    prompt_work::run(n_bytes, move |is_abandoned| {
        let tokenizer = served.engine.tokenizer();
        let shorten = |text: String| {
            let encoded = generate::encode(&served, &text, Encoding::of_what_is_cut(), is_abandoned)?;
            let kept = &encoded[..most.min(encoded.len())];
            Ok(if kept.len() < encoded.len() { tokenizer.decode(kept) } else { text })
        };
        texts.into_iter().map(shorten).collect()
    })
    .await
}

fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let lengths = (dot(a, a) * dot(b, b)).sqrt();
    // A vector of zeros has no direction.
    if lengths > 0.0 { dot(a, b) / lengths } else { 0.0 }
}

/// The prompt was made of `field`, which the client knows.
fn of_field(field: &'static str, error: ApiError) -> ApiError {
    match error.param.as_deref() {
        Some("prompt" | "input") => ApiError { param: Some(field.into()), ..error },
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_angle_counts_and_not_the_length() {
        assert_eq!(cosine(&[3.0, 4.0], &[6.0, 8.0]), 1.0);
        assert_eq!(cosine(&[1.0, 0.0], &[0.0, -2.0]), 0.0);
        assert_eq!(cosine(&[1.0, 0.0], &[-2.0, 0.0]), -1.0);
        assert_eq!(cosine(&[0.0, 0.0], &[1.0, 0.0]), 0.0);
    }

    #[test]
    fn one_query_goes_with_all_and_several_with_as_many() {
        let side = |field, n: usize| Side { field, texts: (0..n).map(|n| n.to_string()).collect() };
        let pairs = |n, m| Pairs::new(side("queries", n), side("documents", m)).map_err(|error| error.param);
        let of_one = pairs(1, 3).unwrap_or_else(|_| panic!("one goes with three"));
        assert_eq!((of_one.query(2), of_one.documents().len()), ("0", 3));
        assert_eq!(pairs(3, 3).unwrap_or_else(|_| panic!("three with three")).query(2), "2");
        for (n, m, param) in [(0, 1, "queries"), (1, 0, "documents"), (2, 3, "documents"), (1, 2049, "documents")] {
            assert_eq!(pairs(n, m).err(), Some(Some(param.to_owned())), "{n} and {m}");
        }
    }
}
