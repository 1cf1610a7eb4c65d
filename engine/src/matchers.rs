//! The matchers of open requests, as the engine thread knows them: which are being walked, which have come back with a mask.
//! Collects the masks of a step, and says whose did not come in time. Walks no grammar itself (`grammar_threads`).
//!
//! A matcher is sent off with every token that its request draws, and comes back with the mask of the next draw and the tokens
//! that must come before that. So there is one task a request at most, and the order in which threads do them changes no mask.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    constraint::{Masks, mask_words},
    grammar_threads::{GrammarThreads, Return, Spelling, Task, Walk},
    request::{FinishReason, Request, RequestId, TokenId},
    sched::{SampledToken, SchedLimits},
    sequence::Sequence,
};

/// One of a step's draws that waits for its mask.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Awaited {
    pub(crate) id: RequestId,
    /// End tokens are banned, because the completion is shorter than its minimum.
    is_below_minimum: bool,
}

impl Awaited {
    /// Of a sequence whose next token is sampled at `position`, if it is constrained.
    pub(crate) fn of(sequence: &Sequence, position: usize) -> Option<Self> {
        sequence.request.sampling.constraint.as_ref()?;
        Some(Self { id: sequence.id, is_below_minimum: sequence.is_below_minimum(position) })
    }
}

/// A request that its constraint ends.
#[derive(Debug, PartialEq)]
pub(crate) struct Violation {
    pub(crate) id: RequestId,
    pub(crate) reason: FinishReason,
}

/// Where the matcher of an open request is.
#[derive(Debug)]
enum Place {
    /// On a grammar thread.
    Away,
    /// Here, with the mask of the next draw.
    Here(Walk),
    /// Nowhere: it cannot go on.
    Lost(FinishReason),
}

/// The matchers of open requests, and the memory of a step's masks.
#[derive(Debug)]
pub(crate) struct Matchers {
    /// Started by the first constrained request.
    threads: Option<GrammarThreads>,
    open: HashMap<RequestId, Place>,
    words: Vec<u32>,
    n_words_each: usize,
    ends: Arc<[TokenId]>,
}

impl Matchers {
    /// Of a model whose completions `ends` may end.
    pub(crate) fn new(vocab_size: usize, ends: &[TokenId]) -> Self {
        let (open, words, n_words_each) = (HashMap::new(), Vec::new(), mask_words(vocab_size));
        Self { threads: None, open, words, n_words_each, ends: ends.into() }
    }

    /// When a request comes: its first mask is filled while it stands in line, behind the tokens that it brings. One that
    /// nothing constrains has no matcher.
    pub(crate) fn open(&mut self, id: RequestId, request: &Request) {
        let Some(constraint) = request.sampling.constraint.clone() else { return };
        let threads = self.threads.get_or_insert_with(GrammarThreads::start);
        let tokens = request.resume.as_ref().map_or(Vec::new(), |resume| resume.tokens.clone());
        // Who wants a token less, wants another one in its place.
        let spelling = if request.sampling.logit_bias.is_empty() { Spelling::Canonical } else { Spelling::Any };
        let (n_words, ends) = (self.n_words_each, Arc::clone(&self.ends));
        threads.send(id, Task::Begin { constraint, n_words, tokens, ends, spelling });
        self.open.insert(id, Place::Away);
    }

    /// After the last step of a request. Most requests have no matcher.
    pub(crate) fn close(&mut self, id: RequestId) {
        if let Some(Place::Here(walk)) = self.open.remove(&id) {
            self.send(id, Task::Drop(walk));
        }
    }

    /// Sends off what a step drew for requests that go on; what was known ahead needs no thread.
    pub(crate) fn accept(&mut self, tokens: &[SampledToken]) {
        if self.open.is_empty() {
            return;
        }
        for SampledToken { id, token, .. } in tokens {
            let Some(place) = self.open.get_mut(id) else { continue };
            if let Place::Here(walk) = place {
                match walk.goes_on_by(*token) {
                    Ok(true) => continue,
                    Ok(false) => {}
                    Err(reason) => {
                        *place = Place::Lost(FinishReason::Error(reason));
                        continue;
                    }
                }
            }
            // Lost: it is about to leave.
            if let Place::Here(walk) = std::mem::replace(place, Place::Away) {
                self.send(*id, Task::GoOn(walk, *token));
            }
        }
    }

    /// Requests whose next tokens are known.
    pub(crate) fn with_tokens_ahead(&self) -> Vec<RequestId> {
        let is_ahead = |place: &Place| matches!(place, Place::Here(walk) if walk.ahead().len() > 0);
        self.open.iter().filter(|(_, place)| is_ahead(place)).map(|(id, _)| *id).collect()
    }

    /// Tokens of a request that must come next.
    pub(crate) fn ahead(&self, id: RequestId) -> Vec<TokenId> {
        match self.open.get(&id) {
            Some(Place::Here(walk)) => walk.ahead().collect(),
            _ => Vec::new(),
        }
    }

    /// The scheduler has so many of them.
    pub(crate) fn take_ahead(&mut self, id: RequestId, n_tokens: usize) {
        if let Some(Place::Here(walk)) = self.open.get_mut(&id) {
            walk.take_ahead(n_tokens);
        }
    }

    /// Takes in what has come back.
    pub(crate) fn take_returns(&mut self) {
        let all: Vec<Return> = self.threads.iter().flat_map(GrammarThreads::returned).collect();
        all.into_iter().for_each(|back| self.take_return(back));
    }

    /// Requests that cannot go on, wherever they are: who stands in line, also again after a preemption, is not computed for nothing.
    pub(crate) fn violations(&self) -> Vec<Violation> {
        let reason = |place: &Place| match place {
            Place::Lost(reason) => Some(reason.clone()),
            Place::Here(walk) => walk.is_over().map(|reason| FinishReason::Unfollowed(reason.to_owned())),
            Place::Away => None,
        };
        self.open.iter().filter_map(|(id, place)| Some(Violation { id: *id, reason: reason(place)? })).collect()
    }

    /// Waits for one to come back.
    pub(crate) fn wait(&mut self, at_most: Duration) {
        let first = self.threads.as_ref().and_then(|threads| threads.wait(at_most));
        first.into_iter().for_each(|back| self.take_return(back));
    }

    /// Whether the next mask of a request is still being filled.
    pub(crate) fn is_away(&self, id: RequestId) -> bool {
        matches!(self.open.get(&id), Some(Place::Away))
    }

    /// Nobody has one.
    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Those whose masks have not come at the deadline.
    pub(crate) fn late(&mut self, awaited: &[RequestId], deadline: Instant) -> Vec<RequestId> {
        loop {
            self.take_returns();
            let late: Vec<RequestId> = awaited.iter().copied().filter(|id| self.is_away(*id)).collect();
            let left = deadline.saturating_duration_since(Instant::now());
            if late.is_empty() || left.is_zero() {
                return late;
            }
            self.wait(left);
        }
    }

    /// Waits for one that cannot be put off.
    pub(crate) fn wait_for(&mut self, id: RequestId) {
        while self.is_away(id) {
            self.wait(Duration::from_secs(1));
        }
    }

    /// The masks of a step, and who must end because nothing is left to draw. A draw that goes nowhere, since its request has
    /// ended or is late, may be anything.
    pub(crate) fn masks(&mut self, awaited: &[Awaited], limits: &SchedLimits) -> (Masks<'_>, Vec<Violation>) {
        let Self { open, words, n_words_each, .. } = self;
        words.resize(awaited.len() * *n_words_each, 0);
        let mut violations = Vec::new();
        for (mask, awaited) in words.chunks_exact_mut(*n_words_each).zip(awaited) {
            let filled = match open.get(&awaited.id) {
                Some(Place::Here(walk)) => {
                    let filled = walk.fill_next(mask).and_then(|()| match awaited.is_below_minimum {
                        true => ban_the_end(mask, limits),
                        false => Ok(()),
                    });
                    filled.map_err(FinishReason::Unfollowed)
                }
                Some(Place::Lost(reason)) => Err(reason.clone()),
                Some(Place::Away) | None => {
                    mask.fill(u32::MAX);
                    Ok(())
                }
            };
            if let Err(reason) = filled {
                violations.push(Violation { id: awaited.id, reason });
                mask.fill(u32::MAX);
            }
        }
        (Masks { words, n_words_each: *n_words_each }, violations)
    }

    fn send(&self, id: RequestId, task: Task) {
        self.threads.as_ref().expect("what walks was begun by a thread").send(id, task);
    }

    /// Of a request that has ended meanwhile, nothing is kept.
    fn take_return(&mut self, (id, back): Return) {
        match (self.open.get_mut(&id), back) {
            (Some(place), Ok(walk)) => *place = Place::Here(walk),
            (Some(place), Err(reason)) => *place = Place::Lost(reason),
            (None, Ok(walk)) => self.send(id, Task::Drop(walk)),
            (None, Err(_)) => {}
        }
    }
}

fn ban_the_end(mask: &mut [u32], limits: &SchedLimits) -> Result<(), String> {
    for end in &limits.eos {
        if let Some(word) = mask.get_mut(*end as usize / 32) {
            *word &= !(1 << (end % 32));
        }
    }
    if mask.iter().all(|word| *word == 0) {
        return Err("the grammar allows only the end here, but min_tokens asks for more: lower min_tokens".into());
    }
    Ok(())
}
