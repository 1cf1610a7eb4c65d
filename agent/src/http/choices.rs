//! The open sequences of one HTTP request: merges their events and ends them all when it is dropped, which is what
//! happens when the client goes away. Decides nothing and formats nothing.

use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use futures::{
    StreamExt,
    stream::{self, BoxStream, SelectAll},
};
use stoker_engine::{
    EngineHandle, FinishReason, PositionLogprobs, PromptPosition, RejectReason, Request, RequestEvent, RequestStream,
    TokenId,
};

use crate::{
    http::{
        error::ApiError,
        extract::Arrival,
        passage::{Drawn, Mark},
        stream::finish_name,
        token_account::TokenAccount,
        usage::{UsageBody, UsageSum},
    },
    identity::Identity,
    replica::ReplicaEnd,
};

/// Sequences being generated for one request, numbered by their place in the answer.
pub(crate) struct Choices {
    events: SelectAll<BoxStream<'static, Numbered>>,
    /// One that was waited for already.
    first: Option<(u32, RequestEvent)>,
    n_choices: u32,
    /// What was told by another replica.
    told: Vec<(u32, RequestEvent)>,
    /// Tokens of each one's prompt that were cached.
    cached: Vec<u32>,
    /// What each one had of its devices' time.
    device_time: Vec<Duration>,
    /// What marks told of it.
    told_time: Vec<Duration>,
    /// Nothing of the answer tells device time.
    is_on_account: bool,
    /// Nothing of the answer tells tokens either.
    token_account: Option<TokenAccount>,
    is_marked: bool,
    /// Holds the drain open until the answer has been written or given up.
    open: Arrival,
}

/// An event of one of several sequences.
struct Numbered {
    index: u32,
    cached_tokens: u32,
    device_time: Duration,
    event: RequestEvent,
}

/// New text of one sequence, and what came with it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Fresh {
    /// Empty while no text is certain.
    pub(crate) text: String,
    /// The tokens behind it.
    pub(crate) tokens: Vec<TokenId>,
    /// One entry a token, when asked for.
    pub(crate) logprobs: Vec<PositionLogprobs>,
}

/// One ended sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Completion {
    /// Its whole text.
    pub(crate) text: String,
    /// Its tokens, the end token included.
    pub(crate) tokens: Vec<TokenId>,
    /// One entry a token, when asked for.
    pub(crate) logprobs: Vec<PositionLogprobs>,
    /// One entry a token of the prompt from its second one, when asked for.
    pub(crate) prompt_logprobs: Vec<PromptPosition>,
    /// Why it ended, by its wire name.
    pub(crate) finish_reason: &'static str,
    /// The stop string that was found.
    pub(crate) stop: Option<String>,
}

impl Choices {
    /// Hands all sequences to the engine; if it refuses one, those before it are dropped and so aborted.
    pub(crate) fn submit(engine: &EngineHandle, requests: Vec<Request>, open: Arrival) -> Result<Self, RejectReason> {
        let n_choices = u32::try_from(requests.len()).expect("admission bounds the number of sequences");
        let mut streams: Vec<RequestStream> =
            requests.into_iter().map(|request| engine.submit(request)).collect::<Result<_, _>>()?;
        let told = streams.iter_mut().zip(0..).flat_map(|(stream, index)| {
            let told = stream.take_told();
            told.into_iter().map(move |event| (index, event))
        });
        let told = told.collect();
        let events = streams.into_iter().zip(0..).map(|(stream, index)| numbered(stream, index)).collect();
        let (cached, device_time) = (vec![0; n_choices as usize], vec![Duration::ZERO; n_choices as usize]);
        let (told_time, is_marked) = (device_time.clone(), open.passage.is_marked());
        let (first, is_on_account, token_account) = (None, false, None);
        Ok(Self {
            events,
            first,
            n_choices,
            told,
            cached,
            device_time,
            told_time,
            is_on_account,
            token_account,
            is_marked,
            open,
        })
    }

    /// What was drawn for the request by who passed it on.
    pub(crate) fn drawn(&self) -> Option<&Drawn> {
        self.open.passage.drawn.as_ref()
    }

    /// Whether its stream is to have marks.
    pub(crate) fn is_marked(&self) -> bool {
        self.is_marked
    }

    /// Whether an answer that is not streamed is to have marks before it.
    pub(crate) fn tells_whole(&self) -> bool {
        self.is_marked && self.open.passage.tells_whole
    }

    /// Marks would not be enough for another replica to go on.
    pub(crate) fn tell_no_marks(&mut self) {
        self.is_marked = false;
    }

    /// The same of an answer that is not streamed: it tells again what was told.
    pub(crate) fn tell_not_whole(&mut self) {
        self.open.passage.tells_whole = false;
    }

    /// Whether its beginning was told by another replica, and what of its choices: all of it before anything new.
    pub(crate) fn take_told(&mut self) -> Option<Vec<(u32, RequestEvent)>> {
        self.open.passage.told.take().map(|_| std::mem::take(&mut self.told))
    }

    /// The mark of new tokens of a choice.
    pub(crate) fn more(&mut self, index: u32, tokens: Vec<TokenId>) -> Mark {
        let device_time = self.tells_device_time().then(|| self.tell_time(index as usize));
        Mark::More { index, cached: self.cached[index as usize], device_time, tokens }
    }

    /// Whether its marks tell device time.
    pub(crate) fn tells_device_time(&self) -> bool {
        self.is_marked && self.open.passage.tells_device_time
    }

    fn tell_time(&mut self, index: usize) -> Duration {
        let now = self.device_time[index];
        self.open.device_time.told(now - std::mem::replace(&mut self.told_time[index], now));
        now
    }

    /// Nothing of its answer tells device time: it is put on account as it comes.
    pub(crate) fn put_on_account(&mut self) {
        self.is_on_account = true;
    }

    /// Nobody waits for the answer to a prompt of so many tokens: these go on account, too, and its own. Whether there is one.
    pub(crate) fn put_tokens_on_account(&mut self, prompt_tokens: u32) -> bool {
        self.put_on_account();
        let account = self.open.device_time.account().cloned();
        self.token_account = account.map(|account| TokenAccount::new(account, prompt_tokens));
        self.token_account.is_some()
    }

    /// What all of them had of their devices' time, once they have ended.
    pub(crate) fn device_time(&self) -> [(HeaderName, HeaderValue); 1] {
        self.open.device_time.header()
    }

    /// What ended a choice, if it was the replica's own end.
    pub(crate) fn replica_end(&self) -> Option<ReplicaEnd> {
        self.open.open.replica_end()
    }

    /// The error that the engine's failure is.
    pub(crate) fn failed(&self, reason: &FinishReason) -> ApiError {
        self.open.failed(reason)
    }

    /// By what replicas are told apart.
    pub(crate) fn identity(&self) -> Option<&Identity> {
        self.open.open.replica().identity()
    }

    /// Sequences in all.
    pub(crate) fn n_choices(&self) -> u32 {
        self.n_choices
    }

    /// Waits until there is something to tell.
    pub(crate) async fn begin(&mut self) {
        self.first = self.next().await;
    }

    /// The next event of any sequence; `None` after all ended.
    pub(crate) async fn next(&mut self) -> Option<(u32, RequestEvent)> {
        match self.first.take() {
            Some(first) => Some(first),
            None => {
                let Numbered { index, cached_tokens, device_time, event } = self.events.next().await?;
                self.cached[index as usize] = cached_tokens;
                let before = std::mem::replace(&mut self.device_time[index as usize], device_time);
                self.open.device_time.add(device_time.saturating_sub(before));
                if self.is_on_account {
                    self.open.device_time.settle();
                }
                if let Some(account) = &mut self.token_account {
                    account.note(cached_tokens, &event);
                }
                if let Some(span) = &mut self.open.span {
                    span.note(index, &event);
                }
                Some((index, event))
            }
        }
    }

    /// Waits for all sequences to end.
    pub(crate) async fn collect(&mut self, usage: UsageSum) -> Result<(Vec<Completion>, UsageBody), ApiError> {
        let mut collected = Collected::new(self.n_choices, usage);
        let mut told = self.take_told().unwrap_or_default().into_iter();
        while let Some((index, event)) = match told.next() {
            Some(told) => Some(told),
            None => self.next().await,
        } {
            collected.take(index, event).map_err(|reason| self.failed(&reason))?;
        }
        if collected.is_whole() { Ok(collected.all()) } else { Err(ApiError::engine_failed("it stopped")) }
    }
}

/// What has come of all sequences.
#[derive(Debug)]
pub(crate) struct Collected {
    completions: Vec<Completion>,
    n_unfinished: usize,
    usage: UsageSum,
}

/// What an event brought.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Taken {
    /// Tokens.
    Tokens(Vec<TokenId>),
    /// The end of a sequence.
    End,
}

impl Collected {
    /// Nothing yet of so many.
    pub(crate) fn new(n_choices: u32, usage: UsageSum) -> Self {
        Self { completions: vec![Completion::default(); n_choices as usize], n_unfinished: n_choices as usize, usage }
    }

    /// Takes in an event; what it brought, or why its sequence failed.
    pub(crate) fn take(&mut self, index: u32, event: RequestEvent) -> Result<Option<Taken>, FinishReason> {
        let completion = &mut self.completions[index as usize];
        match event {
            RequestEvent::Prompt(positions) => completion.prompt_logprobs = positions,
            // Of requests that ask for it, none of which is here.
            RequestEvent::Embedding(_) => {}
            RequestEvent::Delta { text, tokens, logprobs } => {
                self.usage.note(index, &tokens);
                completion.text.push_str(&text);
                completion.tokens.extend_from_slice(&tokens);
                completion.logprobs.extend(logprobs);
                return Ok((!tokens.is_empty()).then_some(Taken::Tokens(tokens)));
            }
            RequestEvent::Finished { reason, stop_match, usage, timing } => {
                completion.stop = stop_match;
                completion.finish_reason = finish_name(reason)?;
                self.usage.add(index, usage, timing);
                self.n_unfinished -= 1;
                return Ok(Some(Taken::End));
            }
        }
        Ok(None)
    }

    /// Whether all have ended.
    pub(crate) fn is_whole(&self) -> bool {
        self.n_unfinished == 0
    }

    /// All of them, and the counts.
    pub(crate) fn all(&mut self) -> (Vec<Completion>, UsageBody) {
        (std::mem::take(&mut self.completions), self.usage.body())
    }
}

fn numbered(stream: RequestStream, index: u32) -> BoxStream<'static, Numbered> {
    let next = move |mut stream: RequestStream| async move {
        let event = stream.next().await?;
        let (cached_tokens, device_time) = (stream.cached_tokens(), stream.device_time());
        Some((Numbered { index, cached_tokens, device_time, event }, stream))
    };
    stream::unfold(stream, next).boxed()
}
