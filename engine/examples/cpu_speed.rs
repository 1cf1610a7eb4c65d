//! Speed of the CPU executor without anything around it, beside the CPU time it took: on a machine that others use
//! too, only the latter repeats. With one thread, tokens per CPU second are the figure.
//!
//! ```text
//! cargo run --release -p stoker-engine --example cpu_speed -- models/ember 1
//! ```

use std::{env, fs, ops::Range, sync::Arc, time::Instant};

use stoker_engine::{
    DeviceChoice, EngineConfig, EngineLimits, LoadedModel, ModelFiles, Request, RequestId, SamplingParams, StopParams,
    exec::{CpuExecutor, Executor},
    kv::{BLOCK_TOKENS, BlockId},
    sched::{ChunkInput, SampleSpec, Step, StepChunk},
};

const PREFILL: usize = 512;
const PROMPT: usize = 128;
const MAX_LEN: usize = 1024;
const SAMPLES: usize = 5;

fn main() {
    let mut args = env::args().skip(1);
    let directory = args.next().expect("usage: cpu_speed MODEL_DIRECTORY [THREADS [DECODE_STEPS]]");
    let number = |arg: Option<String>, or| arg.map_or(or, |arg| arg.parse().expect("a number"));
    let threads = number(args.next(), 1);
    let n_decode = number(args.next(), 128);
    let limits = EngineLimits {
        threads: Some(threads),
        max_model_len: Some(MAX_LEN as u32),
        kv_cache_tokens: Some(32 * MAX_LEN as u32),
        ..EngineLimits::default()
    };
    let config = EngineConfig { model: ModelFiles::Directory(directory.into()), limits, device: DeviceChoice::Cpu };
    let mut model = LoadedModel::open(&config, &|_| {}).expect("the model loads").executor;
    model.warm_up();
    let sequences: Vec<Sequence> = (0..32).map(Sequence::new).collect();
    report("prefill 512", PREFILL, || execute(&mut model, &sequences[..1], 0..PREFILL));
    for n_sequences in [1, 8, 32] {
        let sequences = &sequences[..n_sequences];
        execute(&mut model, sequences, 0..PROMPT);
        report(&format!("decode, {n_sequences} at once"), n_sequences * n_decode, || {
            for position in PROMPT..PROMPT + n_decode {
                execute(&mut model, sequences, position..position + 1);
            }
        });
    }
}

/// A sequence of tokens without meaning, in blocks of its own.
struct Sequence {
    request: Arc<Request>,
    blocks: Vec<BlockId>,
}

impl Sequence {
    fn new(idx: u32) -> Self {
        let prompt = (0..MAX_LEN as u32).map(|i| (i * 31 + idx * 7) % 250).collect();
        let sampling = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
        let request =
            Arc::new(Request { prompt, sampling, stop: StopParams::default(), logprobs: None, ..Request::default() });
        let n_blocks = (MAX_LEN / BLOCK_TOKENS) as u32;
        Self { request, blocks: (idx * n_blocks..(idx + 1) * n_blocks).map(BlockId).collect() }
    }

    fn chunk(&self, positions: Range<usize>) -> StepChunk<'_> {
        let Self { request, blocks } = self;
        let sample =
            SampleSpec { request, position: positions.end, banned: &[], history: &[], slot: 0, enters_slot: false };
        StepChunk {
            id: RequestId(u64::from(blocks[0].0)),
            input: ChunkInput::Known(&request.prompt[positions.clone()]),
            start: positions.start,
            blocks,
            sample: Some(sample),
            is_prefill: positions.len() > 1,
        }
    }
}

fn execute(model: &mut CpuExecutor, sequences: &[Sequence], positions: Range<usize>) {
    let chunks = sequences.iter().map(|sequence| sequence.chunk(positions.clone())).collect();
    model.launch(&Step::of(chunks)).expect("a step on the CPU does not fail");
    model.finish().expect("a step on the CPU does not fail");
}

/// The best of a few runs: what the code can do, not what neighbours left of it.
fn report(case: &str, n_tokens: usize, mut run: impl FnMut()) {
    let mut best = (0.0f64, 0.0f64);
    for _ in 0..SAMPLES {
        let (wall, cpu) = (Instant::now(), cpu_seconds());
        run();
        let per_second = |seconds: f64| n_tokens as f64 / seconds;
        let (wall, cpu) = (per_second(wall.elapsed().as_secs_f64()), per_second(cpu_seconds() - cpu));
        best = (best.0.max(wall), best.1.max(cpu));
    }
    println!("{case:20} {:10.1} tok/s {:10.1} tok per CPU second of this thread", best.0, best.1);
}

/// CPU time of the calling thread, as Linux counts it in nanoseconds.
fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts CPU time");
    stat.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).expect("its first number is CPU time") / 1e9
}
