//! A device whose tokens depend on everything that attention would read: every slot remembers which token at which
//! position was written to it, and a sampled token is a hash of all slots that the block table names, in order. A
//! stale, foreign or missing key therefore changes the text.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use crate::{
    kv::{BLOCK_TOKENS, BlockCopy},
    request::{Request, RequestId, TokenId},
    sched::*,
};

/// The end token of [`FakeDevice`]: about one token in 50.
pub(super) const EOS: TokenId = 0;
const VOCAB: u64 = 50;

/// Writes and reads slots, one step at once, in the order of launch. Counts tokens of sequences as penalties need them: those that
/// a sequence brings into its slot, then its draws.
#[derive(Clone, Debug, Default)]
pub(super) struct FakeDevice {
    slots: Vec<Option<(usize, TokenId)>>,
    counted: BTreeMap<usize, Vec<TokenId>>,
    last_tokens: Vec<TokenId>,
    outputs: VecDeque<StepOutput>,
}

impl FakeDevice {
    pub(super) fn launch(&mut self, step: &Step<'_>) {
        step.copies.iter().for_each(|copy| self.copy(*copy));
        let fed = std::mem::take(&mut self.last_tokens);
        step.chunks.iter().for_each(|chunk| self.write(chunk, &fed));
        let draws = step.chunks.iter().filter_map(|chunk| Some((chunk, chunk.sample?)));
        self.last_tokens = draws.map(|(chunk, spec)| self.draw(chunk, &spec)).collect();
        let entry = |token: &TokenId| Sampled::Token { token: *token, logprobs: None };
        self.outputs.push_back(StepOutput { sampled: self.last_tokens.iter().map(entry).collect() });
    }

    pub(super) fn finish(&mut self) -> StepOutput {
        self.outputs.pop_front().expect("a step is in flight")
    }

    fn copy(&mut self, BlockCopy { from, to }: BlockCopy) {
        let [from, to] = [from, to].map(|block| block.0 as usize * BLOCK_TOKENS);
        self.slots.resize(self.slots.len().max(from.max(to) + BLOCK_TOKENS), None);
        self.slots.copy_within(from..from + BLOCK_TOKENS, to);
    }

    fn write(&mut self, chunk: &StepChunk<'_>, fed: &[TokenId]) {
        let tokens = match chunk.input {
            ChunkInput::Known(tokens) => tokens.to_vec(),
            ChunkInput::Fed { entry } => vec![fed[entry]],
        };
        for (position, token) in (chunk.start..).zip(tokens) {
            let slot = slot(chunk, position);
            self.slots.resize(self.slots.len().max(slot + 1), None);
            self.slots[slot] = Some((position, token));
        }
    }

    fn draw(&mut self, chunk: &StepChunk<'_>, spec: &SampleSpec<'_>) -> TokenId {
        let tokens = self.read(chunk, spec);
        let counted = self.counted.entry(spec.slot).or_default();
        if spec.enters_slot {
            *counted = spec.history.to_vec();
        }
        assert_eq!(*counted, tokens, "{:?}: what its slot counts is what it has", chunk.id);
        let token = token_after(&tokens, spec.request, !spec.banned.is_empty());
        counted.push(token);
        token
    }

    fn read(&self, chunk: &StepChunk<'_>, spec: &SampleSpec<'_>) -> Vec<TokenId> {
        let read = |position| {
            let (written, token) = self.slots[slot(chunk, position)].expect("what attention reads was computed");
            assert_eq!(written, position, "{:?} reads its own keys", chunk.id);
            token
        };
        let tokens: Vec<TokenId> = (0..spec.position).map(read).collect();
        assert!(tokens.starts_with(spec.history), "the history is that of the sequence");
        assert!(!spec.enters_slot || spec.history == tokens, "who enters a slot brings every token");
        tokens
    }
}

fn slot(chunk: &StepChunk<'_>, position: usize) -> usize {
    chunk.blocks[position / BLOCK_TOKENS].0 as usize * BLOCK_TOKENS + position % BLOCK_TOKENS
}

/// What follows `tokens`, by definition.
fn token_after(tokens: &[TokenId], request: &Request, is_eos_banned: bool) -> TokenId {
    let hash = tokens.iter().fold(request.sampling.seed, |hash, token| {
        (hash ^ u64::from(*token)).wrapping_mul(0x100_0000_01B3).rotate_left(23)
    });
    let token = (hash.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) % VOCAB;
    if is_eos_banned { (token as TokenId).max(1) } else { token as TokenId }
}

/// The completion of a request that nobody interferes with.
pub(super) fn completion(request: &Request, limits: &SchedLimits) -> Vec<TokenId> {
    let mut tokens = request.prompt.clone();
    let n_prompt = tokens.len();
    loop {
        let n_generated = tokens.len() - n_prompt;
        let is_banned = n_generated < request.stop.min_tokens as usize;
        tokens.push(token_after(&tokens, request, is_banned));
        let is_full = n_generated + 1 >= request.stop.max_tokens as usize || tokens.len() >= limits.max_model_len;
        if is_full || (!request.stop.ignore_eos && !is_banned && tokens.last() == Some(&EOS)) {
            return tokens.split_off(n_prompt);
        }
    }
}

/// The scheduler with a device under it, stepped as the engine loop does.
#[derive(Debug)]
pub(super) struct Machine {
    pub(super) state: SchedState,
    pub(super) limits: SchedLimits,
    device: FakeDevice,
    max_steps_in_flight: usize,
    in_flight: VecDeque<StepPlan>,
    /// One draw of so many is put off, and its mask comes one or some steps later; 0: none is.
    pub(super) late_one_in: u64,
    /// One sequence of so many is told some of its next tokens, as a grammar would that leaves nothing else; 0: none is.
    pub(super) ahead_one_in: u64,
    n_asked: u64,
}

impl Machine {
    pub(super) fn new(n_blocks: usize, limits: SchedLimits, max_steps_in_flight: usize) -> Self {
        let state = SchedState::new(n_blocks);
        let (device, in_flight) = (FakeDevice::default(), VecDeque::new());
        Self { state, limits, device, max_steps_in_flight, in_flight, late_one_in: 0, ahead_one_in: 0, n_asked: 0 }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.state.is_idle() && self.in_flight.is_empty()
    }

    /// Plans and launches one step.
    pub(super) fn launch(&mut self) -> StepPlan {
        let plan = schedule(&mut self.state, &self.limits);
        self.state.check(&self.limits);
        self.check_copies(&plan);
        if !plan.chunks.is_empty() {
            self.device.launch(&plan.step(&self.state, &self.limits));
        }
        self.in_flight.push_back(plan.clone());
        plan
    }

    /// What is copied is there before the step, and goes where only one writes.
    fn check_copies(&self, plan: &StepPlan) {
        assert!(plan.copies.is_empty() || self.limits.copies_blocks, "nothing is copied where nobody can");
        for copy in &plan.copies {
            assert!(self.state.pool.refs(copy.from) > 0, "somebody holds what is copied");
            // Others may have found it meanwhile, once it is full.
            let goes_on_in_it = |chunk: &&Chunk| {
                self.state.running[chunk.running_idx].table.blocks()[chunk.start / BLOCK_TOKENS] == copy.to
            };
            assert_eq!(
                plan.chunks.iter().filter(goes_on_in_it).count(),
                1,
                "a block that is copied into has one who goes on in it"
            );
            let n_writers = plan.copies.iter().filter(|other| [copy.from, copy.to].contains(&other.to)).count();
            assert_eq!(n_writers, 1, "copies may be made in any order");
        }
    }

    /// Takes in the oldest step in flight.
    pub(super) fn take_in(&mut self) -> StepEffects {
        let Some(plan) = self.in_flight.pop_front() else { return StepEffects::default() };
        let output = if plan.chunks.is_empty() {
            StepOutput::default()
        } else {
            self.charge(&plan);
            self.device.finish()
        };
        let effects = resolve(&mut self.state, plan, output, &self.limits);
        self.state.check(&self.limits);
        effects
    }

    /// Of a step that took some time: who is there still pays its share, and nobody else anything.
    fn charge(&mut self, plan: &StepPlan) {
        self.n_asked += 1;
        let took = Duration::from_nanos(self.n_asked.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 30);
        let accounts = |state: &SchedState| -> BTreeMap<RequestId, Duration> {
            state.running.iter().chain(&state.waiting).map(|sequence| (sequence.id, sequence.device_time)).collect()
        };
        let mut expected = accounts(&self.state);
        for (id, share) in shares(plan, took) {
            expected.entry(id).and_modify(|account| *account += share);
        }
        charge(&mut self.state, plan, took);
        assert_eq!(accounts(&self.state), expected);
        assert_eq!(shares(plan, took).map(|(_, share)| share).sum::<Duration>(), took);
    }

    /// One round of the engine loop.
    pub(super) fn step(&mut self) -> (StepPlan, StepEffects) {
        let came = self.chance(2);
        self.state.note_masks(|id| (id.0 % 2 == 0) == came);
        self.tell_ahead();
        let plan = if self.state.is_idle() { StepPlan::default() } else { self.launch() };
        if self.in_flight.len() == 1 {
            self.put_off_the_late();
        }
        let may_launch_more = !plan.chunks.is_empty() && self.in_flight.len() < self.max_steps_in_flight;
        if may_launch_more {
            return (plan, StepEffects::default());
        }
        let effects = self.take_in();
        self.put_off_the_late();
        (plan, effects)
    }

    /// Of the only step in flight, as when its masks are collected.
    fn put_off_the_late(&mut self) {
        let Some(mut plan) = self.in_flight.pop_front() else { return };
        let drawn: Vec<RequestId> = plan.chunks.iter().filter(|chunk| chunk.samples).map(|chunk| chunk.id).collect();
        for id in drawn {
            if self.late_one_in > 0 && self.chance(self.late_one_in) {
                // One that cannot be put off is waited for.
                let _ = put_off(&mut self.state, &mut plan, id);
                self.state.check(&self.limits);
            } else if let Some(ahead) = self.ahead(id) {
                jump_over_draw(&mut self.state, &mut plan, id, &ahead, &self.limits);
                self.state.check(&self.limits);
            }
        }
        self.in_flight.push_front(plan);
    }

    /// As when matchers have come back before a step is planned.
    fn tell_ahead(&mut self) {
        let all: Vec<RequestId> = self.state.running.iter().chain(&self.state.waiting).map(|s| s.id).collect();
        for id in all {
            if let Some(ahead) = self.ahead(id) {
                jump(&mut self.state, id, &ahead, &self.limits);
                self.state.check(&self.limits);
            }
        }
    }

    /// Some of the tokens that come behind those that a sequence knows.
    fn ahead(&mut self, id: RequestId) -> Option<Vec<TokenId>> {
        if self.ahead_one_in == 0 || !self.chance(self.ahead_one_in) {
            return None;
        }
        let sequence = self.state.running.iter().chain(&self.state.waiting).find(|s| s.id == id)?;
        let (mut tokens, n_known) = (sequence.tokens.clone(), sequence.tokens.len());
        for _ in 0..1 + (self.n_asked % 23) {
            let is_banned = sequence.is_below_minimum(tokens.len());
            tokens.push(token_after(&tokens, &sequence.request, is_banned));
        }
        Some(tokens.split_off(n_known))
    }

    /// Once in so many calls, without a pattern.
    fn chance(&mut self, one_in: u64) -> bool {
        self.n_asked += 1;
        // Multiplied once, calls of a fixed distance would say the same for ever.
        let mixed = self.n_asked.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        (mixed >> 33).is_multiple_of(one_in)
    }

    /// The known tokens of a sequence that has not ended.
    pub(super) fn tokens(&self, id: u64) -> &[TokenId] {
        let mut sequences = self.state.running.iter().chain(&self.state.waiting);
        &sequences.find(|s| s.id == RequestId(id)).expect("the sequence is open").tokens
    }
}
