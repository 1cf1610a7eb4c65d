//! On every instruction set this CPU has, a sequence's logits are the same bits alone, among 31 others, and with its
//! prompt cut into chunks. Opens the executor itself, to see logits.

use std::{ops::Range, path::Path, sync::Arc};

use stoker_engine::{
    EngineLimits, LoadedModel, Request, RequestId, TokenId,
    exec::CpuExecutor,
    kv::{BLOCK_TOKENS, BlockId},
    ops::Isa,
    sched::{ChunkInput, SampleSpec, Step, StepChunk},
};

use crate::{
    common,
    families::{self, Family, Stored},
};

const N_SEQUENCES: u32 = 32;
const N_BLOCKS: u32 = 4;
/// Of the sequence that is compared, in whose window or not there are blocks of every kind.
const PROMPT: usize = 53;
const DECODED: usize = 3;
const THREADS: usize = 2;

/// Tokens without meaning, in KV blocks of their own.
struct Sequence {
    idx: u32,
    request: Arc<Request>,
    blocks: Vec<BlockId>,
}

impl Sequence {
    fn new(idx: u32) -> Self {
        let tokens: Vec<TokenId> = (0..N_BLOCKS * BLOCK_TOKENS as u32).map(|i| (i * i * 7 + idx * 31) % 64).collect();
        let blocks = (idx * N_BLOCKS..(idx + 1) * N_BLOCKS).map(BlockId).collect();
        Self { idx, request: Arc::new(common::greedy(tokens, 1)), blocks }
    }

    /// Tokens at `positions`, the last of which is sampled.
    fn chunk(&self, positions: Range<usize>) -> StepChunk<'_> {
        let Self { idx, request, blocks } = self;
        let sample =
            SampleSpec { request, position: positions.end, banned: &[], history: &[], slot: 0, enters_slot: false };
        StepChunk {
            id: RequestId(u64::from(*idx)),
            input: ChunkInput::Known(&request.prompt[positions.clone()]),
            start: positions.start,
            blocks,
            sample: Some(sample),
            is_prefill: positions.len() > 1,
        }
    }
}

/// The sequence in the middle, and the others around it.
struct Company {
    sequences: Vec<Sequence>,
}

/// Its place.
const SUBJECT: usize = 13;

impl Company {
    fn new() -> Self {
        Self { sequences: (0..N_SEQUENCES).map(Sequence::new).collect() }
    }

    /// After the prompt, and after each token that follows.
    fn alone(&self, model: &mut CpuExecutor, chunk_len: usize) -> Vec<Vec<f32>> {
        let subject = &self.sequences[SUBJECT];
        let chunks = (0..PROMPT).step_by(chunk_len).map(|first| first..PROMPT.min(first + chunk_len));
        let decoded = (PROMPT..PROMPT + DECODED).map(|position| position..position + 1);
        let step = |positions| model.step_logits(&Step::of(vec![subject.chunk(positions)])).remove(0);
        let all: Vec<_> = chunks.chain(decoded).map(step).collect();
        all[all.len() - 1 - DECODED..].to_vec()
    }

    /// The same with prompts of other lengths beside it, then everybody's next tokens.
    fn together(&self, model: &mut CpuExecutor) -> Vec<Vec<f32>> {
        let prompt =
            |sequence: &Sequence| if sequence.idx as usize == SUBJECT { PROMPT } else { sequence.idx as usize + 1 };
        let step = |decoded: usize| {
            let positions = |sequence: &Sequence| match decoded {
                0 => 0..prompt(sequence),
                _ => prompt(sequence) + decoded - 1..prompt(sequence) + decoded,
            };
            Step::of(self.sequences.iter().map(|sequence| sequence.chunk(positions(sequence))).collect())
        };
        (0..=DECODED).map(|decoded| model.step_logits(&step(decoded)).remove(SUBJECT)).collect()
    }
}

/// The model with an empty cache.
fn open(isa: Isa, checkpoint: &Path) -> CpuExecutor {
    let limits = EngineLimits {
        isa: Some(isa),
        threads: Some(THREADS),
        max_model_len: Some(N_BLOCKS * BLOCK_TOKENS as u32),
        kv_cache_tokens: Some(N_SEQUENCES * N_BLOCKS * BLOCK_TOKENS as u32),
        ..EngineLimits::default()
    };
    let model = LoadedModel::open(&common::config(checkpoint, limits), &|_| {});
    model.unwrap_or_else(|error| panic!("{error}")).executor
}

fn check(name: &str, checkpoint: &Path) {
    let company = Company::new();
    for isa in Isa::available() {
        let name = format!("{name} on {isa}");
        let mut model = open(isa, checkpoint);
        let expected = company.alone(&mut model, PROMPT);
        assert!(expected.iter().flatten().all(|logit| logit.is_finite()), "{name}");
        assert_eq!(company.together(&mut model), expected, "{name}: among {} others", N_SEQUENCES - 1);
        for chunk_len in [1, 5, 16] {
            assert_eq!(company.alone(&mut model, chunk_len), expected, "{name}: chunks of {chunk_len}");
        }
    }
}

#[test]
fn every_family_gives_the_same_bits_alone_in_company_and_in_chunks_on_every_instruction_set() {
    let names = families::names();
    assert!(names.len() >= 14, "{names:?}");
    for name in names {
        for stored in [Stored::F32, Stored::Bf16] {
            check(&format!("{name} in {stored:?}"), Family::new(&name, stored).path());
        }
    }
}

#[test]
fn so_do_f16_weights() {
    check("mqa-f16", &common::checkpoint("mqa-f16"));
}
