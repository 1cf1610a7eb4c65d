//! How the world talks to a running engine: submit, read the load, end requests, shut down.
//! Never touches scheduler state; sends commands and reads published values.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{Sender, SyncSender, TrySendError},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tokio::sync::mpsc::Receiver;

use crate::{
    engine_loop::Command,
    events::{StreamMessage, event_channel},
    exec::Abilities,
    info::ModelInfo,
    metrics::{EngineLoad, Meters, Samples},
    output::{OUTPUT_QUEUE_MESSAGES, OutputMessage},
    prefix_news::PrefixNews,
    request::{FinishReason, LOGIT_BIASES_MAX, LOGPROBS_MAX, RejectReason, Request, RequestEvent, RequestId, Usage},
    resume::{End, Replay},
    text::Tokenizer,
    wakefulness::{look_out, look_out_async},
};

/// Why a request ends when the thread that keeps the ledger is gone.
const NO_OUTPUT: &str = "the engine's output thread is gone";

/// A running engine. Cheap to clone; the engine stops when the last handle and the last stream are gone, and whoever drops the last of
/// them waits for its thread: one that is inside a driver while its libraries go with the process may crash it.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

/// What handles and streams share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) commands: Sender<Command>,
    pub(crate) output: SyncSender<OutputMessage>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) meters: Arc<Meters>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) model: ModelInfo,
    pub(crate) abilities: Abilities,
    pub(crate) next_id: AtomicU64,
    pub(crate) prefix_news: Mutex<Option<Receiver<PrefixNews>>>,
    pub(crate) thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shared {
    /// Asks the engine to stop, and waits until its thread is gone.
    fn stop(&self) {
        let _ = self.commands.send(Command::Shutdown);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Err(_)) = thread.map(JoinHandle::join) {
            tracing::error!("the engine thread panicked before it was shut down");
        }
    }
}

/// The line of requests that wait for their first step, bounded.
#[derive(Debug)]
pub(crate) struct Admission {
    waiting: AtomicUsize,
    limit: usize,
}

impl Admission {
    pub(crate) fn new(limit: usize) -> Self {
        Self { waiting: AtomicUsize::new(0), limit }
    }

    fn enter_line(&self) -> Result<(), RejectReason> {
        let enter = |waiting| (waiting < self.limit).then_some(waiting + 1);
        match self.waiting.fetch_update(Ordering::AcqRel, Ordering::Acquire, enter) {
            Ok(_) => Ok(()),
            Err(waiting) => Err(RejectReason::QueueFull { waiting: waiting as u32, limit: self.limit as u32 }),
        }
    }

    pub(crate) fn leave_line(&self, n: usize) {
        self.waiting.fetch_sub(n, Ordering::AcqRel);
    }
}

impl EngineHandle {
    pub(crate) fn new(shared: Shared) -> Self {
        Self { shared: Arc::new(shared) }
    }

    /// Takes a request, or says why not. Its events come through the returned stream.
    pub fn submit(&self, request: Request) -> Result<RequestStream, RejectReason> {
        let request = Arc::new(self.fit(request)?);
        let (events, received) = event_channel();
        let id = RequestId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        if request.stop.max_tokens == 0 {
            return Ok(self.finished_at_once(id, &request));
        }
        let resume = request.resume.as_ref();
        let replay = resume.map(|resume| Replay::of(&request, resume, self.tokenizer(), self.model()));
        let (told, end) = replay.map_or((Vec::new(), None), |Replay { told, end }| (told, end));
        if let Some(end) = end {
            let is_told = resume.is_some_and(|resume| resume.has_ended);
            return Ok(self.ended(id, told, end, is_told));
        }
        self.shared.admission.enter_line()?;
        let at = Instant::now();
        self.shared.meters.opened(at);
        // The ledger hears of the request first, so whatever becomes of the engine, a terminal comes. Never waits: the
        // caller may be a thread that serves everybody.
        let open = OutputMessage::Open { id, request: Arc::clone(&request), events, at };
        self.shared.output.try_send(open).map_err(|unsent| self.turn_away(&unsent))?;
        // An engine that stopped just now has told the output thread, which ends the request.
        let _ = self.shared.commands.send(Command::Submit { id, request });
        let mut stream = RequestStream::new(id, received, Arc::clone(&self.shared));
        stream.told = told;
        Ok(stream)
    }

    /// The latest published reading.
    pub fn load(&self) -> EngineLoad {
        self.shared.meters.load(Instant::now())
    }

    /// Latency samples since the last call.
    pub fn take_samples(&self) -> Samples {
        self.shared.meters.take_samples()
    }

    /// What becomes of marked beginnings of prompts, for the one who takes it first.
    pub fn take_prefix_news(&self) -> Option<Receiver<PrefixNews>> {
        self.shared.prefix_news.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The model being served.
    pub fn model(&self) -> &ModelInfo {
        &self.shared.model
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.shared.tokenizer
    }

    /// Ends every open request with an error; later ones are taken as usual.
    pub fn abort_all(&self, reason: &str) {
        let _ = self.shared.commands.send(Command::EndAll(FinishReason::Error(reason.to_owned())));
    }

    /// Stops the engine; open requests end with an error. Returns when the engine thread is gone.
    pub fn shutdown(&self) {
        self.shared.stop();
    }

    /// Checks a request against the model and clamps its length to the context.
    fn fit(&self, mut request: Request) -> Result<Request, RejectReason> {
        if let Some(reason) = self.shared.meters.stop_reason() {
            return Err(RejectReason::Stopped(reason));
        }
        let ModelInfo { max_model_len, vocab_size, .. } = *self.model();
        let prompt_tokens = request.prompt.len() as u32;
        if prompt_tokens == 0 {
            return Err(RejectReason::EmptyPrompt);
        }
        if prompt_tokens >= max_model_len {
            return Err(RejectReason::PromptTooLong { prompt_tokens, max_model_len });
        }
        let Request { prompt, sampling, logprob_tokens, .. } = &request;
        let resumed = request.resume.iter().flat_map(|resume| &resume.tokens);
        let mut named = prompt.iter().chain(sampling.logit_bias.keys()).chain(logprob_tokens).chain(resumed);
        if let Some(&token) = named.find(|token| **token >= vocab_size) {
            return Err(RejectReason::BadToken { token, vocab_size });
        }
        self.shared.abilities.check(&request)?;
        let asked = request.logprobs.max(request.prompt_logprobs);
        if let Some(asked) = asked.filter(|asked| *asked > LOGPROBS_MAX) {
            return Err(RejectReason::TooManyLogprobs { asked: asked.into(), limit: LOGPROBS_MAX.into() });
        }
        if request.sampling.logit_bias.len() > LOGIT_BIASES_MAX {
            let (biases, limit) = (request.sampling.logit_bias.len() as u32, LOGIT_BIASES_MAX as u32);
            return Err(RejectReason::TooManyBiases { biases, limit });
        }
        request.stop.max_tokens = request.stop.max_tokens.min(max_model_len - prompt_tokens);
        Ok(request)
    }

    /// Takes back what a request that was admitted, and cannot be opened, has been counted as.
    fn turn_away(&self, unsent: &TrySendError<OutputMessage>) -> RejectReason {
        self.shared.admission.leave_line(1);
        self.shared.meters.turned_away();
        match unsent {
            TrySendError::Full(_) => RejectReason::OutputBehind { messages: OUTPUT_QUEUE_MESSAGES as u32 },
            TrySendError::Disconnected(_) => RejectReason::Stopped(NO_OUTPUT.into()),
        }
    }

    /// A request for no token at all has ended before it began; the engine never hears of it.
    fn finished_at_once(&self, id: RequestId, request: &Request) -> RequestStream {
        let (events, received) = event_channel();
        let usage = Usage { prompt_tokens: request.prompt.len() as u32, ..Usage::default() };
        let finished = RequestEvent::Finished { reason: FinishReason::Length, stop_match: None, usage, timing: None };
        events.finish(String::new(), finished);
        RequestStream::new(id, received, Arc::clone(&self.shared))
    }

    /// A request whose completion was all there has only its end to tell, if that; the engine never hears of it.
    fn ended(&self, id: RequestId, mut told: Vec<RequestEvent>, end: End, is_told: bool) -> RequestStream {
        let (events, received) = event_channel();
        if is_told {
            let text = Some(end.last_text).filter(|text| !text.is_empty());
            told.extend(text.map(|text| RequestEvent::Delta { text, tokens: Vec::new(), logprobs: Vec::new() }));
            told.push(end.terminal);
        } else {
            events.finish(end.last_text, end.terminal);
        }
        let mut stream = RequestStream::new(id, received, Arc::clone(&self.shared));
        (stream.told, stream.is_finished) = (told, is_told);
        stream
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The output thread holds a command sender too, so the engine would never see its inbox close by itself.
        self.stop();
    }
}

/// The events of one request. Dropping it before the terminal aborts the request: its blocks are free after the
/// next step.
#[derive(Debug)]
pub struct RequestStream {
    id: RequestId,
    received: Receiver<StreamMessage>,
    shared: Arc<Shared>,
    is_finished: bool,
    /// What another engine has told of it.
    told: Vec<RequestEvent>,
    cached_tokens: u32,
    device_time: Duration,
}

impl RequestStream {
    fn new(id: RequestId, received: Receiver<StreamMessage>, shared: Arc<Shared>) -> Self {
        let (told, device_time) = (Vec::new(), Duration::ZERO);
        Self { id, received, shared, is_finished: false, told, cached_tokens: 0, device_time }
    }

    /// The request's name.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// What another engine has told of it, once: the events that came before the next one.
    pub fn take_told(&mut self) -> Vec<RequestEvent> {
        std::mem::take(&mut self.told)
    }

    /// Tokens of its prompt that were found in a cache; known with its first event.
    pub fn cached_tokens(&self) -> u32 {
        self.cached_tokens
    }

    /// What it has had of its devices' time, with the event that came last: the sum over the devices, in this engine alone. How a step's
    /// time is shared is said at [`shares`](crate::sched::shares).
    pub fn device_time(&self) -> Duration {
        self.device_time
    }

    /// The next event; `None` after the terminal.
    pub async fn next(&mut self) -> Option<RequestEvent> {
        let mut message = self.received.recv().await;
        loop {
            message = match message {
                Some(StreamMessage::Started(cached_tokens)) => {
                    self.cached_tokens = cached_tokens;
                    self.received.recv().await
                }
                Some(StreamMessage::Soon) => match look_out_async(|| self.received.try_recv().ok()).await {
                    None => self.received.recv().await,
                    announced => announced,
                },
                Some(StreamMessage::Event(..)) | None => break,
            };
        }
        self.note(message)
    }

    /// The next event, for callers outside an async runtime; `None` after the terminal.
    pub fn blocking_next(&mut self) -> Option<RequestEvent> {
        let mut message = self.received.blocking_recv();
        loop {
            message = match message {
                Some(StreamMessage::Started(cached_tokens)) => {
                    self.cached_tokens = cached_tokens;
                    self.received.blocking_recv()
                }
                Some(StreamMessage::Soon) => {
                    look_out(|| self.received.try_recv().ok()).or_else(|| self.received.blocking_recv())
                }
                Some(StreamMessage::Event(..)) | None => break,
            };
        }
        self.note(message)
    }

    /// The last defence of "exactly one terminal": a ledger that was lost with its thread can send none.
    fn note(&mut self, message: Option<StreamMessage>) -> Option<RequestEvent> {
        if let Some(StreamMessage::Event(_, device_time)) = message {
            self.device_time = device_time;
        }
        let event = message.and_then(StreamMessage::event);
        let was_finished = self.is_finished;
        self.is_finished |= matches!(event, None | Some(RequestEvent::Finished { .. }));
        let lost = || RequestEvent::Finished {
            reason: FinishReason::Error(NO_OUTPUT.into()),
            stop_match: None,
            usage: Usage::default(),
            timing: None,
        };
        event.or_else(|| (!was_finished).then(lost))
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if !self.is_finished {
            let _ = self.shared.commands.send(Command::End { id: self.id, reason: FinishReason::Abort });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::EngineLimits,
        exec::sim::{SimExecutor, SimScript},
        request::{SamplingParams, StopParams},
    };

    #[test]
    fn a_submission_never_waits_for_the_output_thread() {
        let engine = SimExecutor::start(SimScript::default(), EngineLimits::default()).unwrap();
        let (output, _unread) = std::sync::mpsc::sync_channel(1);
        let mut shared = Arc::into_inner(engine.shared).expect("the only handle");
        shared.output = output;
        let engine = EngineHandle::new(shared);
        let stop = StopParams { max_tokens: 1, ..StopParams::default() };
        let request = || Request {
            prompt: vec![1],
            sampling: SamplingParams::default(),
            stop: stop.clone(),
            logprobs: None,
            ..Request::default()
        };
        let _first = engine.submit(request()).expect("there is room for one message");
        let refused = engine.submit(request()).unwrap_err();
        assert_eq!(refused, RejectReason::OutputBehind { messages: OUTPUT_QUEUE_MESSAGES as u32 });
        assert_eq!(engine.load().open_requests, 1, "who was turned away is not open");
    }

    #[test]
    fn a_stream_whose_ledger_is_lost_still_gets_one_terminal() {
        let engine = SimExecutor::start(SimScript::default(), EngineLimits::default()).unwrap();
        let (events, received) = event_channel();
        drop(events);
        let shared = Arc::clone(&engine.shared);
        let mut stream = RequestStream::new(RequestId(7), received, shared);
        let terminal = stream.blocking_next();
        assert!(matches!(terminal, Some(RequestEvent::Finished { reason: FinishReason::Error(_), .. })));
        assert_eq!(stream.blocking_next(), None);
    }
}
