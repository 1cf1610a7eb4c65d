//! One replica: a line, sequences that share steps, and a cache of blocks of which the ones not used for longest go first. Speeds are
//! about those of an 8B model on one H100. Knows no other replica.

use std::collections::{HashMap, VecDeque};

use stoker_routing::BYTES_PER_TOKEN;

use super::{
    cache::Cache,
    load::Request,
    prompt::{BLOCK_TOKENS, Prompt},
    rules::{Event, Said},
};

/// Seconds of a step, whatever is in it.
const STEP_SECONDS: f64 = 0.008;
/// Seconds a token of prefill adds.
const PREFILL_SECONDS: f64 = 1.0 / 25_000.0;
/// Seconds a decoding sequence adds.
const DECODE_SECONDS: f64 = 0.000_06;
/// Tokens in a step at most.
const STEP_TOKENS: u32 = 4096;
/// Sequences at a time at most.
const SEQUENCES: usize = 128;
/// KV blocks: 400,000 tokens.
pub(crate) const CACHE_BLOCKS: usize = 25_000;

#[derive(Debug)]
struct Sequence {
    id: usize,
    request: Request,
    /// Of the prompt.
    to_prefill: u32,
    to_decode: u32,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Replica {
    pub(crate) cache: Cache,
    waiting: VecDeque<(usize, Request)>,
    running: Vec<Sequence>,
    /// When the step under way ends, if one is.
    pub(crate) until: Option<f64>,
    /// Seconds in which it computed.
    pub(crate) busy: f64,
    /// Tokens of prompts that were there.
    pub(crate) cached_tokens: u64,
    /// What gateways call beginnings that end in a block.
    names: HashMap<u64, Vec<u64>>,
    /// What it has not told yet of what it holds.
    untold: Vec<Event>,
}

/// What a step brought.
#[derive(Debug, Default)]
pub(crate) struct Stepped {
    /// Requests that have their first token.
    pub(crate) began: Vec<usize>,
    /// Requests that have their last.
    pub(crate) ended: Vec<usize>,
}

impl Replica {
    pub(crate) fn new() -> Self {
        Self {
            cache: Cache::of(CACHE_BLOCKS),
            waiting: VecDeque::new(),
            running: Vec::new(),
            until: None,
            busy: 0.0,
            cached_tokens: 0,
            names: HashMap::new(),
            untold: Vec::new(),
        }
    }

    pub(crate) fn take(&mut self, id: usize, request: Request, now: f64) {
        self.waiting.push_back((id, request));
        if self.until.is_none() {
            self.begin_step(now);
        }
    }

    pub(crate) fn said(&self) -> Said {
        let blocks = |request: &Request| request.prompt.tokens.div_ceil(BLOCK_TOKENS);
        let referenced: u32 = self.running.iter().map(|sequence| blocks(&sequence.request)).sum();
        Said {
            running: self.running.len() as u32,
            waiting: self.waiting.len() as u32,
            prefill_tokens: self.waiting.iter().map(|(_, request)| u64::from(request.prompt.tokens)).sum(),
            kv_share: f64::from(referenced) / CACHE_BLOCKS as f64,
        }
    }

    /// The step ends; the next one begins if there is anything to do.
    pub(crate) fn end_step(&mut self, now: f64) -> Stepped {
        let mut stepped = Stepped::default();
        let mut computed = Vec::new();
        for sequence in &mut self.running {
            if sequence.to_prefill > 0 {
                continue;
            }
            if sequence.to_decode == sequence.request.completion_tokens {
                stepped.began.push(sequence.id);
                computed.push(sequence.request.prompt.clone());
            }
            sequence.to_decode -= 1;
            if sequence.to_decode == 0 {
                stepped.ended.push(sequence.id);
            }
        }
        self.running.retain(|sequence| sequence.to_decode > 0);
        computed.iter().for_each(|prompt| self.keep(prompt));
        self.begin_step(now);
        stepped
    }

    /// What it has not told yet.
    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.untold)
    }

    fn keep(&mut self, prompt: &Prompt) {
        let gone = self.cache.touch(&prompt.blocks);
        for mark in prompt.chain.marks() {
            let block = prompt.blocks[(mark.end / (BLOCK_TOKENS * BYTES_PER_TOKEN)) as usize - 1];
            let names = self.names.entry(block).or_default();
            if !names.contains(&mark.hash) {
                names.push(mark.hash);
                self.untold.push(Event::Stored(mark.hash));
            }
        }
        let names = gone.iter().filter_map(|block| self.names.remove(block)).flatten();
        self.untold.extend(names.map(Event::Removed));
    }

    fn begin_step(&mut self, now: f64) {
        let decoding = self.running.iter().filter(|sequence| sequence.to_prefill == 0).count() as u32;
        let mut room = STEP_TOKENS - decoding;
        let mut prefilled = 0;
        for sequence in &mut self.running {
            let chunk = sequence.to_prefill.min(room);
            (sequence.to_prefill, room, prefilled) = (sequence.to_prefill - chunk, room - chunk, prefilled + chunk);
        }
        while room > 0
            && self.running.len() < SEQUENCES
            && let Some((id, request)) = self.waiting.pop_front()
        {
            let held = self.cache.held(&request.prompt.blocks) as u32 * BLOCK_TOKENS;
            // The last token is computed in any case: something must be drawn from.
            let held = held.min(request.prompt.tokens - 1);
            self.cached_tokens += u64::from(held);
            let to_prefill = request.prompt.tokens - held;
            let chunk = to_prefill.min(room);
            (room, prefilled) = (room - chunk, prefilled + chunk);
            let to_decode = request.completion_tokens;
            self.running.push(Sequence { id, to_prefill: to_prefill - chunk, to_decode, request });
        }
        self.until = (!self.running.is_empty()).then(|| {
            let seconds = STEP_SECONDS + PREFILL_SECONDS * f64::from(prefilled) + DECODE_SECONDS * f64::from(decoding);
            self.busy += seconds;
            now + seconds
        });
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::prompt::{Piece, Prompt},
        *,
    };

    fn request(id: u64, tokens: u32) -> Request {
        Request { prompt: Prompt::of(&[Piece { id, tokens }]), completion_tokens: 2 }
    }

    /// Seconds to the first token and blocks that were cached.
    fn first_token(replica: &mut Replica, id: usize, request: Request, now: f64) -> f64 {
        replica.take(id, request, now);
        loop {
            let until = replica.until.unwrap();
            if replica.end_step(until).began.contains(&id) {
                return until - now;
            }
        }
    }

    #[test]
    fn it_tells_what_it_holds_and_what_it_gives_up() {
        let mut replica = Replica::new();
        first_token(&mut replica, 0, request(1, 200_000), 0.0);
        let stored = replica.take_events();
        let names: Vec<u64> = request(1, 200_000).prompt.chain.marks().iter().map(|mark| mark.hash).collect();
        assert_eq!(stored, names.iter().copied().map(Event::Stored).collect::<Vec<_>>());
        first_token(&mut replica, 1, request(2, 300_000), 100.0);
        let gone = replica.take_events().into_iter().filter_map(|event| match event {
            Event::Removed(name) => Some(name),
            Event::Stored(_) => None,
        });
        let gone: Vec<u64> = gone.collect();
        assert!(!gone.is_empty() && gone.iter().all(|name| names.contains(name)));
        assert!(gone.contains(names.last().unwrap()) && !gone.contains(&names[0]), "the end goes first");
    }

    #[test]
    fn a_prompt_that_was_there_begins_sooner() {
        let mut replica = Replica::new();
        let cold = first_token(&mut replica, 0, request(1, 16_000), 0.0);
        let warm = first_token(&mut replica, 1, request(1, 16_000), 100.0);
        assert!(cold > 0.64 && warm < 0.02, "{cold} {warm}");
        assert_eq!(replica.cached_tokens, 15_999);
    }
}
