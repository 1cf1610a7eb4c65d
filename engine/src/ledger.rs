//! Open requests and their way out: every request that was opened gets exactly one terminal, whatever happens.
//! Counts tokens and times. Lives on the output thread; never touches scheduler state.

use std::{collections::HashMap, sync::Arc, time::Instant};

use crate::{
    events::{Delta, EventSender, TooFarBehind},
    exec::{RowsRead, Score},
    metrics::{Meters, RequestSample},
    pooling::Pooled,
    request::{FinishReason, PromptPosition, Request, RequestEvent, RequestId, Usage},
    sched::{SampledToken, Started, StepEffects},
    text::{TextAssembler, Tokenizer, spell_logprobs},
};

/// All open requests.
#[derive(Debug)]
pub(crate) struct Ledger {
    open: HashMap<RequestId, OpenRequest>,
    tokenizer: Arc<Tokenizer>,
    meters: Arc<Meters>,
}

#[derive(Debug)]
struct OpenRequest {
    events: EventSender,
    text: TextAssembler,
    usage: Usage,
    max_tokens: u32,
    /// Its prompt's part of the usage is known from where it began.
    is_resumed: bool,
    submitted: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Instant,
    preemptions: u32,
    /// What is known of the prompt, if it is wanted; told before the first token.
    prompt: Option<PromptRead>,
}

/// What is read of a prompt.
#[derive(Debug)]
enum PromptRead {
    Logprobs(Vec<PromptPosition>),
    Embedding(Pooled),
}

impl PromptRead {
    /// Nothing yet of what a request wants.
    fn wanted_by(request: &Request) -> Option<Self> {
        let logprobs = request.prompt_logprobs.map(|_| Self::Logprobs(Vec::new()));
        logprobs.or_else(|| request.pooling.map(|_| Self::Embedding(Pooled::default())))
    }

    /// All of it, told.
    fn event(self) -> RequestEvent {
        match self {
            Self::Logprobs(positions) => RequestEvent::Prompt(positions),
            Self::Embedding(pooled) => RequestEvent::Embedding(pooled.mean()),
        }
    }
}

/// How a request ends.
struct Terminal {
    reason: FinishReason,
    stop_match: Option<String>,
}

impl Ledger {
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, meters: Arc<Meters>) -> Self {
        Self { open: HashMap::new(), tokenizer, meters }
    }

    /// Begins a request.
    pub(crate) fn open(&mut self, id: RequestId, request: &Request, events: EventSender, now: Instant) {
        let resumed = request.resume.as_ref();
        let usage = Usage {
            prompt_tokens: request.prompt.len() as u32,
            completion_tokens: resumed.map_or(0, |resume| resume.tokens.len() as u32),
            cached_tokens: resumed.map_or(0, |resume| resume.cached_tokens),
        };
        let mut text = TextAssembler::new(&request.stop);
        for token in resumed.into_iter().flat_map(|resume| &resume.tokens) {
            text.push(*token, &self.tokenizer);
        }
        let entry = OpenRequest {
            events,
            text,
            is_resumed: resumed.is_some(),
            usage,
            max_tokens: request.stop.max_tokens,
            submitted: now,
            started: None,
            first_token: None,
            last_token: now,
            preemptions: 0,
            prompt: PromptRead::wanted_by(request),
        };
        let previous = self.open.insert(id, entry);
        assert!(previous.is_none(), "{id:?} is opened once");
    }

    /// Calls whoever waits for the first tokens of these requests.
    pub(crate) fn announce(&self, ids: &[RequestId]) {
        for entry in ids.iter().filter_map(|id| self.open.get(id)) {
            entry.events.announce();
        }
    }

    /// Applies one step. Returns the requests that ended here, by a stop string or because nobody reads them: the engine does
    /// not know yet.
    pub(crate) fn apply(&mut self, effects: StepEffects, now: Instant) -> Vec<RequestId> {
        for started in effects.started {
            self.started(started, now);
        }
        for id in effects.preempted {
            self.open.entry(id).and_modify(|entry| entry.preemptions += 1);
        }
        for (id, rows) in effects.read {
            self.read(id, rows);
        }
        let stopped = effects.tokens.into_iter().filter_map(|token| self.token(token, now)).collect();
        for ended in effects.ended {
            self.close(ended.id, Terminal { reason: ended.reason, stop_match: None }, now);
        }
        stopped
    }

    /// Ends every open request with an error.
    pub(crate) fn close_all(&mut self, reason: &str, now: Instant) {
        let ids: Vec<RequestId> = self.open.keys().copied().collect();
        for id in ids {
            let terminal = Terminal { reason: FinishReason::Error(reason.to_owned()), stop_match: None };
            self.close(id, terminal, now);
        }
    }

    fn started(&mut self, started: Started, now: Instant) {
        let Started { id, cached_tokens } = started;
        if let Some(entry) = self.open.get_mut(&id) {
            entry.started = Some(now);
            if !entry.is_resumed {
                entry.usage.cached_tokens = cached_tokens.unwrap_or(0) as u32;
            }
            entry.events.started(entry.usage.cached_tokens);
            // What another engine generated is a part of the prompt here.
            let Usage { prompt_tokens, completion_tokens, .. } = entry.usage;
            self.meters.started(prompt_tokens + completion_tokens, cached_tokens.map(|n| n as u64));
        }
    }

    fn read(&mut self, id: RequestId, rows: RowsRead) {
        let Some(prompt) = self.open.get_mut(&id).and_then(|entry| entry.prompt.as_mut()) else { return };
        match (prompt, rows) {
            (PromptRead::Logprobs(positions), RowsRead::Scores(scores)) => {
                positions.extend(scores.into_iter().map(|Score { token, rank, logprobs }| PromptPosition {
                    rank,
                    logprobs: spell_logprobs(token, logprobs, &self.tokenizer),
                }));
            }
            (PromptRead::Embedding(pooled), RowsRead::Outputs { values, width }) => pooled.add(&values, width),
            (PromptRead::Embedding(pooled), RowsRead::Sum { sums, n_rows }) => pooled.add_sums(&sums, n_rows),
            (_, rows) => unreachable!("{rows:?} were not asked for"),
        }
    }

    /// Tokens of a request that has already ended by a stop string are dropped: it is no longer open.
    fn token(&mut self, sampled: SampledToken, now: Instant) -> Option<RequestId> {
        let SampledToken { id, token, logprobs, device_time } = sampled;
        let entry = self.open.get_mut(&id)?;
        entry.events.device_time = device_time;
        entry.usage.completion_tokens += 1;
        self.meters.token(entry.first_token.is_none(), (now - entry.last_token).as_secs_f64(), now);
        entry.first_token.get_or_insert(now);
        entry.last_token = now;
        entry.prompt.take().into_iter().for_each(|prompt| entry.events.prompt(prompt.event()));
        let scan = entry.text.push(token, &self.tokenizer);
        let logprobs = logprobs.map(|raw| spell_logprobs(token, raw, &self.tokenizer)).into_iter().collect();
        let sent = entry.events.send(Delta { text: scan.text, tokens: vec![token], logprobs });
        let terminal = match (sent, scan.matched) {
            (Err(TooFarBehind { n_tokens }), _) => {
                let reason = format!("its client does not read: {n_tokens} tokens wait for it");
                Terminal { reason: FinishReason::Error(reason), stop_match: None }
            }
            (Ok(()), Some(stop)) => Terminal { reason: FinishReason::Stop, stop_match: Some(stop) },
            (Ok(()), None) => return None,
        };
        self.close(id, terminal, now);
        Some(id)
    }

    /// The only place a terminal is sent.
    fn close(&mut self, id: RequestId, terminal: Terminal, now: Instant) {
        let Some(mut entry) = self.open.remove(&id) else { return };
        let Terminal { reason, stop_match } = terminal;
        let last_text = if stop_match.is_none() { entry.text.finish() } else { String::new() };
        let sample = entry.sample(reason.clone(), now);
        // What another engine generated took longer than is known here.
        let timing = sample.timing().filter(|_| !entry.is_resumed);
        self.meters.ended(sample, now);
        entry.events.finish(last_text, RequestEvent::Finished { reason, stop_match, usage: entry.usage, timing });
    }
}

impl OpenRequest {
    fn sample(&self, reason: FinishReason, now: Instant) -> RequestSample {
        let since_submission = |at: Instant| (at - self.submitted).as_secs_f64();
        RequestSample {
            reason,
            usage: self.usage,
            max_tokens: self.max_tokens,
            queue_seconds: self.started.map(since_submission),
            ttft_seconds: self.first_token.map(since_submission),
            e2e_seconds: since_submission(now),
            preemptions: self.preemptions,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::sync::mpsc::Receiver;

    use super::*;
    use crate::{
        events::{StreamMessage, event_channel},
        request::{RequestTiming, SamplingParams, StopParams},
        sched::Ended,
    };

    struct Fixture {
        ledger: Ledger,
        now: Instant,
    }

    impl Fixture {
        fn new() -> Self {
            let now = Instant::now();
            let ledger = Ledger::new(Arc::new(Tokenizer::bytes()), Arc::new(Meters::new(1, now)));
            Self { ledger, now }
        }

        fn open(&mut self, id: u64, stop: &[&str]) -> Receiver<StreamMessage> {
            let (events, received) = event_channel();
            let stop = StopParams { stop: stop.iter().map(|s| s.to_string()).collect(), ..StopParams::default() };
            let request = Request {
                prompt: vec![1, 2],
                sampling: SamplingParams::default(),
                stop,
                logprobs: None,
                ..Request::default()
            };
            self.ledger.meters.opened(self.now);
            self.ledger.open(RequestId(id), &request, events, self.now);
            received
        }

        fn token(&mut self, id: u64, byte: u8) -> Vec<RequestId> {
            let token = token_of(id, byte.into());
            self.ledger.apply(StepEffects { tokens: vec![token], ..StepEffects::default() }, self.now)
        }

        fn end(&mut self, id: u64, reason: FinishReason) {
            let ended = Ended { id: RequestId(id), reason, never_started: false };
            self.ledger.apply(StepEffects { ended: vec![ended], ..StepEffects::default() }, self.now);
        }
    }

    fn token_of(id: u64, token: u32) -> SampledToken {
        SampledToken { id: RequestId(id), token, logprobs: None, device_time: Duration::ZERO }
    }

    fn drain(received: &mut Receiver<StreamMessage>) -> (String, Vec<RequestEvent>) {
        let mut text = String::new();
        let mut terminals = Vec::new();
        while let Ok(message) = received.try_recv() {
            match message.event() {
                None => {}
                Some(RequestEvent::Delta { text: piece, .. }) => text.push_str(&piece),
                Some(terminal) => terminals.push(terminal),
            }
        }
        (text, terminals)
    }

    #[test]
    fn a_stop_string_ends_the_request_once_and_later_tokens_go_nowhere() {
        let mut fixture = Fixture::new();
        let mut received = fixture.open(1, &["b"]);
        assert!(fixture.token(1, b'a').is_empty());
        assert_eq!(fixture.token(1, b'b'), [RequestId(1)]);
        assert!(fixture.token(1, b'c').is_empty());
        fixture.end(1, FinishReason::Abort);
        let (text, terminals) = drain(&mut received);
        assert_eq!(text, "a");
        let usage = Usage { prompt_tokens: 2, completion_tokens: 2, cached_tokens: 0 };
        let stop_match = Some("b".to_owned());
        let terminal = RequestEvent::Finished { reason: FinishReason::Stop, stop_match, usage, timing: None };
        assert_eq!(terminals, [terminal]);
    }

    #[test]
    fn who_asked_is_told_how_long_each_part_took() {
        let mut fixture = Fixture::new();
        let mut received = fixture.open(1, &[]);
        fixture.now += Duration::from_millis(250);
        let started = Started { id: RequestId(1), cached_tokens: None };
        fixture.ledger.apply(StepEffects { started: vec![started], ..StepEffects::default() }, fixture.now);
        fixture.now += Duration::from_millis(500);
        fixture.token(1, b'a');
        fixture.now += Duration::from_millis(1000);
        fixture.end(1, FinishReason::Length);
        let (_, terminals) = drain(&mut received);
        let expected = RequestTiming { queue_seconds: 0.25, ttft_seconds: 0.75, e2e_seconds: 1.75 };
        assert!(
            matches!(&terminals[..], [RequestEvent::Finished { timing: Some(told), .. }] if *told == expected),
            "{terminals:?}"
        );
    }

    #[test]
    fn every_event_tells_what_the_request_had_of_its_devices_by_then() {
        let mut fixture = Fixture::new();
        let mut received = fixture.open(1, &["b"]);
        for (byte, millis) in [(b'a', 3), (b'b', 5)] {
            let token = SampledToken { device_time: Duration::from_millis(millis), ..token_of(1, byte.into()) };
            fixture.ledger.apply(StepEffects { tokens: vec![token], ..StepEffects::default() }, fixture.now);
        }
        let mut told = Vec::new();
        while let Ok(StreamMessage::Event(_, device_time)) = received.try_recv() {
            told.push(device_time.as_millis());
        }
        assert_eq!(told, [3, 5, 5], "two tokens and the end, which the second one is");
    }

    #[test]
    fn text_held_for_a_stop_string_is_shown_when_the_request_ends_otherwise() {
        let mut fixture = Fixture::new();
        let mut received = fixture.open(1, &["bc"]);
        fixture.token(1, b'a');
        fixture.token(1, b'b');
        fixture.end(1, FinishReason::Length);
        let (text, terminals) = drain(&mut received);
        assert_eq!((text.as_str(), terminals.len()), ("ab", 1));
    }

    #[test]
    fn special_tokens_have_text_where_somebody_reads_them() {
        let mut fixture = Fixture::new();
        let (events, mut received) = event_channel();
        let stop = StopParams { shown_specials: [256].into(), ..StopParams::default() };
        let request = Request {
            prompt: vec![1],
            sampling: SamplingParams::default(),
            stop,
            logprobs: None,
            ..Request::default()
        };
        let mut hidden = fixture.open(2, &[]);
        fixture.ledger.open(RequestId(1), &request, events, fixture.now);
        for id in [1, 2] {
            for token in [97, 256] {
                let token = token_of(id, token);
                fixture.ledger.apply(StepEffects { tokens: vec![token], ..StepEffects::default() }, fixture.now);
            }
        }
        assert_eq!((drain(&mut received).0.as_str(), drain(&mut hidden).0.as_str()), ("a<|end|>", "a"));
    }

    #[test]
    fn a_stopped_engine_ends_every_open_request_with_an_error() {
        let mut fixture = Fixture::new();
        let mut streams: Vec<_> = (0..3).map(|id| fixture.open(id, &[])).collect();
        fixture.end(1, FinishReason::Length);
        fixture.ledger.close_all("lost the device", fixture.now);
        fixture.ledger.close_all("again", fixture.now);
        let reasons: Vec<_> = streams.iter_mut().map(|received| drain(received).1).collect();
        assert!(reasons.iter().all(|terminals| terminals.len() == 1));
        let load = fixture.ledger.meters.load(fixture.now);
        assert_eq!((load.finished.error, load.finished.length, load.open_requests), (2, 1, 0));
    }

    #[test]
    fn a_client_that_went_away_is_still_counted_once() {
        let mut fixture = Fixture::new();
        drop(fixture.open(1, &[]));
        fixture.token(1, b'a');
        fixture.end(1, FinishReason::Abort);
        assert_eq!(fixture.ledger.meters.load(fixture.now).finished.abort, 1);
    }
}
