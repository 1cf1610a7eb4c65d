//! The open sequences of one HTTP request: merges their events and ends them all when it is dropped, which is what
//! happens when the client goes away. Decides nothing and formats nothing.

use futures::{
    StreamExt,
    stream::{self, BoxStream, SelectAll},
};
use stoker_engine::{
    EngineHandle, PositionLogprobs, PromptPosition, RejectReason, Request, RequestEvent, RequestStream, TokenId,
};

use crate::{
    http::{
        error::ApiError,
        stream::finish_name,
        usage::{UsageBody, UsageSum},
    },
    replica::OpenRequest,
};

/// Sequences being generated for one request, numbered by their place in the answer.
pub(crate) struct Choices {
    events: SelectAll<BoxStream<'static, (u32, RequestEvent)>>,
    /// One that was waited for already.
    first: Option<(u32, RequestEvent)>,
    n_choices: u32,
    /// Holds the drain open until the answer has been written or given up.
    _open: OpenRequest,
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
    pub(crate) fn submit(
        engine: &EngineHandle,
        requests: Vec<Request>,
        open: OpenRequest,
    ) -> Result<Self, RejectReason> {
        let n_choices = u32::try_from(requests.len()).expect("admission bounds the number of sequences");
        let streams: Vec<RequestStream> =
            requests.into_iter().map(|request| engine.submit(request)).collect::<Result<_, _>>()?;
        let events = streams.into_iter().zip(0..).map(|(stream, index)| numbered(stream, index)).collect();
        Ok(Self { events, first: None, n_choices, _open: open })
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
            None => self.events.next().await,
        }
    }

    /// Waits for all sequences to end.
    pub(crate) async fn collect(mut self, mut usage: UsageSum) -> Result<(Vec<Completion>, UsageBody), ApiError> {
        let mut completions = vec![Completion::default(); self.n_choices as usize];
        let mut unfinished = self.n_choices;
        while let Some((index, event)) = self.next().await {
            let completion = &mut completions[index as usize];
            match event {
                RequestEvent::Prompt(positions) => completion.prompt_logprobs = positions,
                RequestEvent::Delta { text, tokens, logprobs } => {
                    usage.note(index, &tokens);
                    completion.text.push_str(&text);
                    completion.tokens.extend(tokens);
                    completion.logprobs.extend(logprobs);
                }
                RequestEvent::Finished { reason, stop_match, usage: counts } => {
                    completion.stop = stop_match;
                    completion.finish_reason = finish_name(&reason)?;
                    usage.add(index, counts);
                    unfinished -= 1;
                }
            }
        }
        if unfinished > 0 { Err(ApiError::engine_failed("it stopped")) } else { Ok((completions, usage.body())) }
    }
}

fn numbered(stream: RequestStream, index: u32) -> BoxStream<'static, (u32, RequestEvent)> {
    stream::unfold(stream, move |mut stream| async move { stream.next().await.map(|event| ((index, event), stream)) })
        .boxed()
}
