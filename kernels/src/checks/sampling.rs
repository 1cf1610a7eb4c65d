//! Comparisons of the sampling tail: tokens must be the reference's, not merely near.

use std::thread;

use cudarc::driver::CudaSlice;

use super::{Gpu, Outcome};
use crate::{
    KernelError,
    noise::Noise,
    reads::{SCORE_WORDS, ScoreTokens, TokenScore},
    reference::{self, RowHistory},
    sampling::{
        LOGPROB_WORDS, LOGPROBS_MAX, MarkTokens, Marks, NO_TOKEN, Sample, SampleOptions, SampleRow, SampleScratch,
        Selection, SlotEntry, TokenEdit, Turn,
    },
};

/// Rows of each kind where vocabularies are those of models.
const REPEATS: usize = 1;
/// Draws of each row, one behind the other: later ones see the tokens of earlier ones in their marks only.
const STEPS: usize = 3;
/// A sum of n positive terms in f32, each thread's first and then theirs, is off by at most (n / 1024 + 10 + 5) 2^-24 of itself
/// and its exponentials by 2^-22: 2e-5 at 262145 tokens. Subtracting from a logit below 16 rounds by 1e-6.
const LOGPROB_LIMIT: f64 = 3e-5;

/// Vocabularies and rows for a race checker, which is some hundred times slower.
pub(super) fn run_small(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = run(gpu, &[1, 33, 4096], 1)?;
    outcomes.push(ties_and_broken_rows(gpu)?);
    Ok(outcomes)
}

/// Vocabularies of models.
pub(super) fn run_large(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    run(gpu, &[32_001, 128_256, 151_936, 262_145], REPEATS)
}

fn run(gpu: &mut Gpu, vocabularies: &[usize], repeats: usize) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = Vec::new();
    for &vocab in vocabularies {
        for spread in [Spread::Real, Spread::Tied] {
            outcomes.extend(draws(gpu, Case { vocab, repeats, spread })?);
            for (n_rows, n_top) in [(1, 0), (7, 1), (19, 5), (3, LOGPROBS_MAX)] {
                outcomes.push(scores(gpu, (vocab, spread), n_rows, n_top)?);
            }
        }
    }
    Ok(outcomes)
}

/// What is drawn from.
#[derive(Clone, Copy, Debug)]
struct Case {
    vocab: usize,
    repeats: usize,
    spread: Spread,
}

/// How logits lie.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Spread {
    /// A deviation of 3 leaves some hundred likely tokens.
    Real,
    /// So few values that thousands of tokens are the likeliest.
    Tied,
}

/// One row, and what its kernel knows only by its marks.
#[derive(Clone, Debug)]
struct Asked {
    row: SampleRow,
    prompt: Vec<u32>,
    completion: Vec<u32>,
    edits: Vec<TokenEdit>,
    mask: Option<Vec<u32>>,
}

/// Every filter alone and together, each without more, with penalties and edits, with log-probabilities, with a mask,
/// and with everything; on rows of their own seeds.
fn asked(noise: &mut Noise, case: Case) -> Vec<Asked> {
    let plain = SampleRow { temperature: 1.0, ..SampleRow::GREEDY };
    let kinds = [
        SampleRow::GREEDY,
        plain,
        SampleRow { temperature: 0.3, ..plain },
        SampleRow { top_k: 1, ..plain },
        SampleRow { top_k: 50, ..plain },
        SampleRow { top_k: 1000, ..plain },
        SampleRow { top_p: 0.9, ..plain },
        SampleRow { top_p: 0.01, ..plain },
        SampleRow { ln_min_p: 0.05f32.ln(), ..plain },
        SampleRow { temperature: 0.7, top_k: 40, top_p: 0.8, ln_min_p: 0.02f32.ln(), ..plain },
        SampleRow { top_k: 1 << 30, top_p: 0.999, ..plain },
    ];
    let (mut all, mut n_slots, mut n_masks, mut n_logprobs) = (Vec::new(), 0, 0, 0);
    for _ in 0..case.repeats {
        for (kind, extras) in kinds.iter().flat_map(|kind| (0..5).map(move |extras| (*kind, extras))) {
            let next = |count: &mut i32, wanted: bool| {
                *count += i32::from(wanted);
                if wanted { *count - 1 } else { -1 }
            };
            let row = SampleRow {
                seed: noise.bits(),
                position: noise.bits() % 100_000,
                slot: next(&mut n_slots, matches!(extras, 1 | 4)),
                logprobs: next(&mut n_logprobs, matches!(extras, 2 | 4)),
                mask: next(&mut n_masks, matches!(extras, 3 | 4)),
                n_top: if extras == 2 { 5 } else { LOGPROBS_MAX as u32 },
                ..kind
            };
            all.push(with_history(noise, row, case.vocab));
        }
    }
    all
}

fn with_history(noise: &mut Noise, row: SampleRow, vocab: usize) -> Asked {
    let mut tokens = |n: usize| (0..n).map(|_| noise.below(vocab) as u32).collect::<Vec<_>>();
    let is_marked = row.slot >= 0;
    let (prompt, completion) = if is_marked { (tokens(700), tokens(90)) } else { Default::default() };
    let mut edited = if is_marked { tokens(300) } else { Vec::new() };
    edited.sort_unstable();
    edited.dedup();
    let edit = |(i, &token): (usize, &u32)| TokenEdit {
        token,
        bias: (i % 9) as f32 - 4.0,
        banned_until: if i % 10 == 0 { row.position as u32 + 1 } else { 0 },
    };
    let edits = edited.iter().enumerate().map(edit).collect();
    // Two bits of three are set; never all clear.
    let word = |_| (noise.bits() | noise.bits()) as u32 | 1;
    let mask = (row.mask >= 0).then(|| (0..vocab.div_ceil(32)).map(word).collect());
    let row = if is_marked { SampleRow { presence: 0.5, frequency: 0.25, repetition: 1.3, ..row } } else { row };
    Asked { row: row.with_options(), prompt, completion, edits, mask }
}

/// What is on the device while rows are drawn again and again.
struct Bench {
    logits: CudaSlice<f32>,
    marks: Marks,
    masks: CudaSlice<u32>,
    scratch: SampleScratch,
    vocab: usize,
}

/// Tokens, and words of log-probabilities.
type Drawn = (Vec<u32>, Vec<u32>);

impl Bench {
    fn new(gpu: &Gpu, asked: &[Asked], logits: &[f32], vocab: usize) -> Result<Self, KernelError> {
        let masks: Vec<u32> = asked.iter().filter_map(|asked| asked.mask.clone()).flatten().chain([0]).collect();
        let device = gpu.kernels.device();
        let mut marks = Marks::new(device, asked.len(), vocab)?;
        enter_slots(gpu, asked, &mut marks)?;
        let (logits, masks) = (gpu.upload(logits)?, gpu.upload(&masks)?);
        Ok(Self { logits, marks, masks, scratch: SampleScratch::new(device, asked.len())?, vocab })
    }

    /// All launches of one step.
    fn draw(&mut self, gpu: &Gpu, rows: &[SampleRow]) -> Result<Drawn, KernelError> {
        let Self { logits, marks, masks, scratch, vocab } = self;
        let how = gpu.upload(rows)?;
        let mut tokens = gpu.poisoned(rows.len())?;
        let mut logprobs = gpu.upload(&vec![0u32; rows.len() * LOGPROB_WORDS])?;
        gpu.kernels.sample(Sample {
            tokens: tokens.view(),
            logits: logits.as_view(),
            rows: how.as_view(),
            scratch,
            vocab: *vocab,
        })?;
        for turn in [Turn::Free, Turn::Masked(masks.as_view())] {
            gpu.kernels.sample_options(SampleOptions {
                tokens: tokens.view(),
                logprobs: logprobs.as_view_mut(),
                logits: logits.as_view(),
                rows: how.as_view(),
                marks,
                turn,
                selection: Selection::Needed,
                scratch,
            })?;
        }
        Ok((gpu.written(&tokens)?.unwrap_or_default(), gpu.download(&logprobs)?))
    }
}

fn enter_slots(gpu: &Gpu, asked: &[Asked], marks: &mut Marks) -> Result<(), KernelError> {
    let (mut entries, mut histories, mut edits) = (Vec::new(), Vec::new(), Vec::new());
    for asked in asked.iter().filter(|asked| asked.row.slot >= 0) {
        entries.push(SlotEntry {
            slot: asked.row.slot as u32,
            first_token: histories.len() as u32,
            n_prompt: asked.prompt.len() as u32,
            n_tokens: (asked.prompt.len() + asked.completion.len()) as u32,
            first_edit: edits.len() as u32,
            n_edits: asked.edits.len() as u32,
        });
        histories.extend(asked.prompt.iter().chain(&asked.completion));
        edits.extend(&asked.edits);
    }
    if entries.is_empty() {
        return Ok(());
    }
    let (entries, histories, edits) = (gpu.upload(&entries)?, gpu.upload(&histories)?, gpu.upload(&edits)?);
    // Twice: a slot forgets what it held.
    for _ in 0..2 {
        gpu.kernels.mark_tokens(MarkTokens {
            marks: &mut *marks,
            entries: entries.as_view(),
            histories: histories.as_view(),
            edits: edits.as_view(),
        })?;
    }
    Ok(())
}

impl Spread {
    fn logits(self, noise: &mut Noise, n: usize) -> Vec<f32> {
        let logit = |noise: &mut Noise| match self {
            Self::Real => 3.0 * noise.normal(),
            Self::Tied => noise.below(4) as f32,
        };
        (0..n).map(|_| logit(noise)).collect()
    }
}

/// Given tokens: their log-probabilities, ranks and the likeliest beside; the last row has a NaN.
fn scores(
    gpu: &mut Gpu,
    (vocab, spread): (usize, Spread),
    n_rows: usize,
    n_top: usize,
) -> Result<Outcome, KernelError> {
    let mut logits = spread.logits(&mut gpu.noise, (n_rows + 1) * vocab);
    let at = gpu.noise.below(vocab);
    logits[n_rows * vocab + at] = f32::NAN;
    let given: Vec<u32> = (0..=n_rows).map(|_| gpu.noise.below(vocab) as u32).collect();
    let (on_device, tokens) = (gpu.upload(&logits)?, gpu.upload(&given)?);
    let mut out = gpu.upload(&vec![0u32; given.len() * SCORE_WORDS])?;
    gpu.kernels.score_tokens(ScoreTokens {
        out: out.as_view_mut(),
        logits: on_device.as_view(),
        tokens: tokens.as_view(),
        vocab,
        n_top,
    })?;
    let words = gpu.download(&out)?;
    let error = |((words, logits), &token): ((&[u32], &[f32]), &u32)| {
        let n_larger = logits.iter().filter(|logit| **logit > logits[token as usize]).count();
        match words[LOGPROB_WORDS] as usize == n_larger + 1 {
            true => distance(words, logits, token, n_top),
            false => f64::INFINITY,
        }
    };
    let rows = words.chunks(SCORE_WORDS).zip(logits.chunks(vocab)).zip(&given).take(n_rows);
    let broken = TokenScore::of(&words[n_rows * SCORE_WORDS..]);
    let says_so = broken.logprob.is_nan() && broken.rank == 1 && broken.top.is_empty();
    let worst = rows.map(error).fold(if says_so { 0.0 } else { f64::INFINITY }, f64::max);
    let case = format!("{n_rows} rows of {vocab}, {n_top} beside, {spread:?}");
    Ok(Outcome { op: "score_tokens", case, error: worst, limit: LOGPROB_LIMIT })
}

fn draws(gpu: &mut Gpu, case: Case) -> Result<[Outcome; 2], KernelError> {
    let Case { vocab, spread, .. } = case;
    let mut asked = asked(&mut gpu.noise, case);
    let logits = spread.logits(&mut gpu.noise, asked.len() * vocab);
    let mut bench = Bench::new(gpu, &asked, &logits, vocab)?;
    let (mut n_different, mut worst) = (0, 0.0f64);
    for _ in 0..STEPS {
        let rows: Vec<SampleRow> = asked.iter().map(|asked| asked.row).collect();
        let (tokens, logprobs) = bench.draw(gpu, &rows)?;
        if tokens.len() != rows.len() {
            return Ok(outcomes(case, asked.len(), f64::INFINITY, f64::INFINITY));
        }
        let expected = expected(&asked, &logits, vocab);
        n_different += expected.iter().zip(&tokens).filter(|(expected, found)| expected != found).count();
        for ((asked, logits), &found) in asked.iter_mut().zip(logits.chunks(vocab)).zip(&tokens) {
            if asked.row.logprobs >= 0 {
                let own = &logprobs[asked.row.logprobs as usize * LOGPROB_WORDS..][..LOGPROB_WORDS];
                worst = worst.max(distance(own, logits, found, asked.row.n_top as usize));
            }
            asked.go_on(found);
        }
    }
    Ok(outcomes(case, asked.len(), n_different as f64, worst))
}

/// The number of other tokens, and the largest distance of a log-probability. No other token is allowed: a logarithm that differs in
/// its last bit moves the outcome only where two scores of some 10^5 agree to 10^-6, which these seeds do not hit.
fn outcomes(case: Case, n_rows: usize, n_different: f64, worst: f64) -> [Outcome; 2] {
    let Case { vocab, spread, .. } = case;
    let name = format!("{STEPS} steps of {n_rows} rows of {vocab}, {spread:?}");
    [
        Outcome { op: "sample", case: name.clone(), error: n_different, limit: 0.0 },
        Outcome { op: "logprobs", case: name, error: worst, limit: LOGPROB_LIMIT },
    ]
}

/// The reference sorts whole vocabularies: on all CPUs.
fn expected(asked: &[Asked], logits: &[f32], vocab: usize) -> Vec<u32> {
    let n_each = asked.len().div_ceil(thread::available_parallelism().map_or(1, usize::from));
    thread::scope(|scope| {
        let parts = asked.chunks(n_each).zip(logits.chunks(n_each * vocab));
        let of_part = |(asked, logits): (&[Asked], &[f32])| -> Vec<u32> {
            asked.iter().zip(logits.chunks(vocab)).map(|(asked, logits)| asked.expected(logits)).collect()
        };
        let workers: Vec<_> = parts.map(|part| scope.spawn(move || of_part(part))).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("the reference does not panic")).collect()
    })
}

impl Asked {
    fn expected(&self, logits: &[f32]) -> u32 {
        let Self { row, prompt, completion, edits, mask } = self;
        let history = RowHistory { prompt, completion, edits, mask: mask.as_deref() };
        reference::sample(&reference::edited(logits, *row, history), *row)
    }

    fn go_on(&mut self, token: u32) {
        self.row.position += 1;
        if self.row.slot >= 0 {
            self.completion.push(token);
        }
    }
}

/// Infinite where tokens are not those of the reference: equal logits come with the lowest token first. `words` may go on behind theirs.
fn distance(words: &[u32], logits: &[f32], token: u32, n_top: usize) -> f64 {
    let (chosen, top) = reference::logprobs(logits, token, n_top);
    let found = |word: u32| f64::from(f32::from_bits(word));
    let pairs = || words[2..].chunks_exact(2).take(words[1] as usize);
    if words[1] as usize != top.len() || !pairs().map(|pair| pair[0]).eq(top.iter().map(|(token, _)| *token)) {
        return f64::INFINITY;
    }
    let distances = pairs().zip(&top).map(|(pair, (_, wanted))| (found(pair[1]) - wanted).abs());
    distances.fold((found(words[0]) - chosen).abs(), f64::max)
}

fn ties_and_broken_rows(gpu: &mut Gpu) -> Result<Outcome, KernelError> {
    let vocab = 10_000;
    let mut logits: Vec<f32> = vec![0.0; 4 * vocab];
    logits[9_999] = 1.0;
    logits[5_000] = 1.0;
    logits[vocab + 7_777] = f32::NAN;
    logits[2 * vocab..3 * vocab].fill(f32::NEG_INFINITY);
    logits[3 * vocab + 42] = f32::INFINITY;
    let expected = [5_000, NO_TOKEN, 0, 42];
    let mut n_different = 0;
    for row in [SampleRow::GREEDY, SampleRow { temperature: 1.0, top_k: 1, ..SampleRow::GREEDY }] {
        let asked = vec![with_history(&mut gpu.noise, row, vocab); 4];
        let (found, _) = Bench::new(gpu, &asked, &logits, vocab)?.draw(gpu, &[row.with_options(); 4])?;
        // Which of two equal logits a draw takes is its noise's choice.
        let is_draw = row.temperature > 0.0;
        let is_right =
            |(at, (found, wanted)): (usize, (&u32, &u32))| found == wanted || (is_draw && at == 0 && *found == 9_999);
        let rights = found.iter().zip(&expected).enumerate().filter(|pair| is_right(*pair)).count();
        n_different += expected.len() - rights;
    }
    let case = "ties, NaN and infinities".to_owned();
    Ok(Outcome { op: "sample", case, error: n_different as f64, limit: 0.0 })
}
