//! Comparisons of attention over a cache whose blocks lie in any order and whose unused slots are NaN, in both number formats.

use std::collections::HashMap;

use half::f16;

use super::{
    Gpu, Outcome,
    fixture::{Poisoned, widened},
    relative_error,
};
use crate::{
    CudaSlice, KernelError,
    attention::{DecodeScratch, PagedDecode, PagedKv, PagedPrefill, PrefillScratch, ScratchSize},
    bf16,
    cache::{KvFormat, LayerCache},
    codes,
    launch::{AttentionSpec, BLOCK_SIZE, Heads, PrefillKernel},
    noise::Noise,
    plan::{self, Context, PrefillChunk, PrefillTile, SplitPolicy},
    reference::{self, AttentionRow},
};

/// Output and weights are bf16, and the weights of a long context are added up with it: 1.9e-3 is what other
/// implementations show against f32; the limit is the bound of two roundings.
const LIMIT: f64 = super::TWO_ROUNDINGS;

/// Tiles of nobody behind a plan: more than one round of the chip.
const SURPLUS_TILES: usize = 40;

/// A code of e4m3 that stands for none.
const NOT_A_NUMBER: u8 = 0x7f;

const HEADS: [Heads; 4] = [
    Heads { n_q: 32, n_kv: 8, dim: 128 },
    Heads { n_q: 14, n_kv: 2, dim: 64 },
    Heads { n_q: 4, n_kv: 4, dim: 64 },
    Heads { n_q: 16, n_kv: 1, dim: 128 },
];

/// What other families have: other widths, windows from one token to longer than a context, soft-caps.
fn others() -> Vec<AttentionSpec> {
    let spec = |n_q, n_kv, dim| plain(Heads { n_q, n_kv, dim });
    let windowed = |window, spec| AttentionSpec { window: Some(window), ..spec };
    // Scores are of the size of one: a cap far above them would not be seen.
    let capped = |spec| AttentionSpec { softcap: Some(0.7), ..spec };
    vec![
        spec(6, 2, 16),
        windowed(100, spec(3, 3, 48)),
        spec(5, 5, 96),
        windowed(257, spec(8, 2, 96)),
        spec(4, 1, 80),
        capped(spec(6, 3, 112)),
        windowed(1, spec(14, 2, 64)),
        windowed(300, spec(32, 8, 128)),
        capped(windowed(64, spec(4, 4, 64))),
        capped(spec(8, 2, 128)),
        spec(4, 1, 256),
        capped(windowed(129, spec(8, 4, 256))),
        windowed(5000, spec(16, 1, 256)),
        spec(2, 2, 160),
    ]
}

pub(super) fn decodes(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = Vec::new();
    for (heads, format) in in_both(HEADS) {
        outcomes.extend(decodes_of(gpu, plain(heads), format)?);
    }
    Ok(outcomes)
}

pub(super) fn other_decodes(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = vec![];
    for (spec, format) in in_both(others()) {
        outcomes.extend(decodes_of(gpu, spec, format)?);
    }
    for heads in
        [Heads { n_q: 4, n_kv: 4, dim: 64 }, Heads { n_q: 2, n_kv: 2, dim: 128 }, Heads { n_q: 2, n_kv: 2, dim: 256 }]
    {
        // E4m3 has no infinity.
        for sick in [(f32::NAN, KvFormat::Bf16), (f32::INFINITY, KvFormat::Bf16), (f32::NAN, KvFormat::E4m3)] {
            outcomes.push(neighbours(gpu, plain(heads), sick)?);
            outcomes.push(neighbours(gpu, AttentionSpec { window: Some(650), ..plain(heads) }, sick)?);
        }
    }
    Ok(outcomes)
}

fn in_both<T: Copy>(cases: impl IntoIterator<Item = T>) -> impl Iterator<Item = (T, KvFormat)> {
    cases.into_iter().flat_map(|case| KvFormat::ALL.map(|format| (case, format)))
}

fn decodes_of(gpu: &mut Gpu, spec: AttentionSpec, format: KvFormat) -> Result<Vec<Outcome>, KernelError> {
    let n_slots = 2 * gpu.kernels.properties().n_multiprocessors as usize;
    let policies = [SplitPolicy::Balanced { n_slots }, SplitPolicy::fixed(4096, n_slots)];
    let mut outcomes = Vec::new();
    for policy in policies {
        outcomes.push(decode(gpu, &apart(&[1, 15, 16, 17, 333, 1024, 2047]), (spec, policy), format)?);
        outcomes.push(decode(gpu, &apart(&[3001]), (spec, policy), format)?);
    }
    // Few slots, so that these few sequences fill them: contexts in one piece, and in several.
    for n_slots in [spec.heads.n_kv, 4 * spec.heads.n_kv] {
        outcomes.extend(shared(gpu, (spec, SplitPolicy::Balanced { n_slots }), format)?);
    }
    outcomes.extend(shared(gpu, (spec, policies[1]), format)?);
    outcomes.push(independence(gpu, spec, format)?);
    Ok(outcomes)
}

pub(super) fn prefills(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = Vec::new();
    for (heads, format) in in_both(HEADS) {
        outcomes.extend(prefills_of(gpu, plain(heads), format)?);
    }
    Ok(outcomes)
}

pub(super) fn other_prefills(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = Vec::new();
    for (spec, format) in in_both(others()) {
        outcomes.extend(prefills_of(gpu, spec, format)?);
    }
    Ok(outcomes)
}

fn prefills_of(gpu: &mut Gpu, spec: AttentionSpec, format: KvFormat) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = Vec::new();
    for kernel in prefill_kernels(gpu) {
        let how = (spec, kernel);
        outcomes.push(prefill(gpu, &[(0, 1), (0, 15), (100, 3), (1000, 17), (0, 100), (31, 333)], how, format)?);
        outcomes.push(prefill(gpu, &[(0, 513)], how, format)?);
        // Few tiles over a long past, which the plan cuts; then tiles enough for several rounds of the chip.
        outcomes.push(prefill(gpu, &[(2048, 70), (1500, 9)], how, format)?);
        outcomes.push(prefill(gpu, &[(0, 700), (130, 1100), (5, 600)], how, format)?);
    }
    Ok(outcomes)
}

/// Two prefixes in turn, and nobody's; then more sequences than are read together. One has a single token of its own.
fn shared(gpu: &mut Gpu, how: Decoding, format: KvFormat) -> Result<[Outcome; 2], KernelError> {
    let (long, short, none) = (Some((0, 37)), Some((1, 16)), None);
    let mixed = [(593, long), (300, short), (2000, long), (257, short), (500, none), (600, long), (911, long)];
    Ok([decode(gpu, &mixed, how, format)?, decode(gpu, &[(700, long); 19], how, format)?])
}

/// Those that this chip has.
fn prefill_kernels(gpu: &Gpu) -> Vec<PrefillKernel> {
    let best = PrefillKernel::for_device(gpu.kernels.properties());
    if best == PrefillKernel::Mma { vec![best] } else { vec![PrefillKernel::Mma, best] }
}

/// How sequences decode.
type Decoding = (AttentionSpec, SplitPolicy);

/// Sequences of given lengths in a fresh cache.
struct Cache {
    heads: Heads,
    format: KvFormat,
    k: Vec<f32>,
    v: Vec<f32>,
    /// Keys, and values, as they are stored: without their scales.
    stored: [Vec<f32>; 2],
    /// Of each KV head's keys, then of each one's values.
    scales: Vec<f32>,
    table: Vec<i32>,
    blocks_per_row: usize,
    on_device: (LayerCache, CudaSlice<i32>),
}

/// A sequence's length, and which prefix of how many blocks it begins with, if it shares one.
type Sequence = (usize, Option<(usize, usize)>);

/// A row of q, whose sequence's, and how many tokens it sees.
type Row = (usize, usize, usize);

/// Sequences that share nothing.
fn apart(lens: &[usize]) -> Vec<Sequence> {
    lens.iter().map(|&len| (len, None)).collect()
}

impl Cache {
    fn new(gpu: &mut Gpu, sequences: &[Sequence], heads: Heads, format: KvFormat) -> Result<Self, KernelError> {
        let blocks_per_row = sequences.iter().map(|(len, _)| len.div_ceil(BLOCK_SIZE)).max().unwrap_or(1) + 1;
        let mut order = gpu.noise.permutation(sequences.len() * blocks_per_row);
        let size = order.len() * heads.block_values();
        for (row, (_, prefix)) in sequences.iter().enumerate() {
            let Some((_, n_blocks)) = prefix else { continue };
            // Those of the first sequence that has it.
            let first = sequences.iter().position(|(_, other)| other == prefix).unwrap_or(row);
            order.copy_within(first * blocks_per_row..first * blocks_per_row + n_blocks, row * blocks_per_row);
        }
        let mut caches = [vec![f32::NAN; size], vec![f32::NAN; size]];
        let numbers = Numbers::new(&mut gpu.noise, format);
        for (row, &(len, _)) in sequences.iter().enumerate() {
            for token in 0..len {
                let block = order[row * blocks_per_row + token / BLOCK_SIZE] as usize;
                for head in 0..heads.n_kv {
                    let at = reference::cache_offset(block * BLOCK_SIZE + token % BLOCK_SIZE, head, heads);
                    for cache in &mut caches {
                        cache[at..at + heads.dim].fill_with(|| numbers.draw(&mut gpu.noise));
                    }
                }
            }
        }
        let stored = caches;
        // Scores and results remain of the size of one, and no two heads have the same.
        let scales: Vec<f32> = match format {
            KvFormat::Bf16 => vec![1.0; 2 * heads.n_kv],
            KvFormat::E4m3 => (0..2 * heads.n_kv).map(|at| 0.7 + 0.6 / (at + 1) as f32).collect(),
        };
        let scaled = |stored: &[f32], scales: &[f32]| {
            let heads_of_blocks = stored.chunks(BLOCK_SIZE * heads.dim).zip(scales.iter().cycle());
            heads_of_blocks.flat_map(|(numbers, scale)| numbers.iter().map(move |x| x * scale)).collect()
        };
        let (k, v) = (scaled(&stored[0], &scales[..heads.n_kv]), scaled(&stored[1], &scales[heads.n_kv..]));
        let on_device = (uploaded(gpu, &stored, &scales, format)?, gpu.upload(&order)?);
        Ok(Self { heads, format, k, v, stored, scales, table: order, blocks_per_row, on_device })
    }

    fn view(&self) -> PagedKv<'_> {
        let (cache, table) = &self.on_device;
        PagedKv { cache, block_table: table.as_view(), blocks_per_row: self.blocks_per_row }
    }

    /// What decoding sequences of these lengths read.
    fn contexts(&self, lens: &[usize]) -> Vec<Context<'_, i32>> {
        let rows = self.table.chunks_exact(self.blocks_per_row);
        lens.iter()
            .zip(rows)
            .map(|(&n_tokens, blocks)| Context { n_tokens, n_settled: n_tokens.saturating_sub(1), blocks })
            .collect()
    }

    /// The reference of all rows, on all processors: it takes most of the time of a comparison.
    fn attend_all(&self, q: &[f32], rows: &[Row], spec: AttentionSpec) -> Vec<f32> {
        let width = self.heads.qkv_width();
        let attend = |&(row, sequence, n_visible): &Row| self.attend(&q[row * width..], sequence, n_visible, spec);
        let n_threads = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            let parts = rows.chunks(rows.len().div_ceil(n_threads).max(1));
            let threads: Vec<_> =
                parts.map(|part| scope.spawn(move || part.iter().flat_map(attend).collect::<Vec<_>>())).collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("the reference does not panic")).collect()
        })
    }

    /// The reference of one token of `sequence` that sees `n_visible` tokens. `q` is a fused row.
    fn attend(&self, q: &[f32], sequence: usize, n_visible: usize, spec: AttentionSpec) -> Vec<f32> {
        reference::attention(&AttentionRow {
            q: &q[..self.heads.n_q * self.heads.dim],
            k_cache: &self.k,
            v_cache: &self.v,
            blocks: &self.table[sequence * self.blocks_per_row..][..self.blocks_per_row],
            n_visible,
            spec,
        })
    }
}

/// Numbers that a cache's format has.
struct Numbers {
    /// Of e4m3: some to draw from, as rounding each would take longer than everything else.
    some: Vec<f32>,
}

impl Numbers {
    fn new(noise: &mut Noise, format: KvFormat) -> Self {
        let n = if format == KvFormat::E4m3 { 509 } else { 0 };
        Self { some: (0..n).map(|_| reference::e4m3(noise.normal())).collect() }
    }

    fn draw(&self, noise: &mut Noise) -> f32 {
        if self.some.is_empty() {
            bf16::from_f32(noise.normal()).to_f32()
        } else {
            self.some[noise.below(self.some.len())]
        }
    }
}

fn uploaded(gpu: &Gpu, [k, v]: &[Vec<f32>; 2], scales: &[f32], format: KvFormat) -> Result<LayerCache, KernelError> {
    Ok(match format {
        KvFormat::Bf16 => LayerCache::Bf16 { k: gpu.upload_bf16(k)?, v: gpu.upload_bf16(v)? },
        KvFormat::E4m3 => {
            let of_number: HashMap<u32, u8> = (0..=u8::MAX).map(|code| (codes::e4m3(code).to_bits(), code)).collect();
            let code = |x: &f32| if x.is_nan() { NOT_A_NUMBER } else { of_number[&x.to_bits()] };
            let codes = |values: &[f32]| gpu.upload(&values.iter().map(code).collect::<Vec<u8>>());
            LayerCache::E4m3 { k: codes(k)?, v: codes(v)?, scales: gpu.upload(scales)? }
        }
    })
}

/// As they are before a cache: of e4m3 they are f16 in bf16's place.
fn queries(gpu: &Gpu, q: &[f32], format: KvFormat) -> Result<CudaSlice<bf16>, KernelError> {
    match format {
        KvFormat::Bf16 => gpu.upload_bf16(q),
        KvFormat::E4m3 => {
            gpu.upload(&q.iter().map(|x| bf16::from_bits(f16::from_f32(*x).to_bits())).collect::<Vec<_>>())
        }
    }
}

fn plain(heads: Heads) -> AttentionSpec {
    AttentionSpec::plain(heads, 1.0 / (heads.dim as f32).sqrt())
}

fn decode(
    gpu: &mut Gpu,
    sequences: &[Sequence],
    (spec, policy): Decoding,
    format: KvFormat,
) -> Result<Outcome, KernelError> {
    let heads = spec.heads;
    let cache = Cache::new(gpu, sequences, heads, format)?;
    let lens: Vec<usize> = sequences.iter().map(|(len, _)| *len).collect();
    let q = gpu.noise.normals(lens.len() * heads.qkv_width());
    let found = run_decode(gpu, &cache, &q, &lens, (spec, policy))?;
    let rows: Vec<Row> = lens.iter().enumerate().map(|(row, &n_visible)| (row, row, n_visible)).collect();
    let wanted = cache.attend_all(&q, &rows, spec);
    let error = found.map_or(f64::INFINITY, |found| relative_error(&found, &wanted));
    let n_shared = sequences.iter().filter(|(_, prefix)| prefix.is_some()).count();
    let case =
        format!("{} sequences ({n_shared} with a prefix), {}, {policy:?}, {format:?}", lens.len(), describe(spec));
    Ok(Outcome { op: "paged_decode", case, error, limit: LIMIT })
}

/// What is written; nothing where there is a hole or a NaN.
fn run_decode(
    gpu: &Gpu,
    cache: &Cache,
    q: &[f32],
    lens: &[usize],
    how: Decoding,
) -> Result<Option<Vec<f32>>, KernelError> {
    let out = launch_decode(gpu, cache, q, lens, how)?;
    Ok(gpu.written(&out)?.map(|found| widened(&found)))
}

/// The same, NaN included.
fn run_decode_unchecked(
    gpu: &Gpu,
    cache: &Cache,
    q: &[f32],
    lens: &[usize],
    how: Decoding,
) -> Result<Vec<f32>, KernelError> {
    let out = launch_decode(gpu, cache, q, lens, how)?;
    Ok(widened(&gpu.held(&out)?))
}

fn launch_decode(
    gpu: &Gpu,
    cache: &Cache,
    q: &[f32],
    lens: &[usize],
    (spec, policy): Decoding,
) -> Result<Poisoned<bf16>, KernelError> {
    let heads = cache.heads;
    let len_max = lens.iter().copied().max().unwrap_or(1);
    let n_items = plan::decode_items_max(lens.len(), len_max, heads, policy);
    let mut plan = plan::plan_decode(&cache.contexts(lens), heads, policy);
    plan.pad(n_items);
    let (items, readers) = (gpu.upload(&plan.items)?, gpu.upload(&plan.readers)?);
    let size = ScratchSize { n_sequences: lens.len(), n_items, policy, heads };
    let mut scratch = DecodeScratch::new(gpu.stream(), size)?;
    let q = queries(gpu, q, cache.format)?;
    let mut out = gpu.poisoned(lens.len() * heads.n_q * heads.dim)?;
    // Twice: the second launch finds the tickets as the first one left them.
    for _ in 0..2 {
        gpu.kernels.paged_decode(PagedDecode {
            out: out.view(),
            q: q.as_view(),
            q_stride: heads.qkv_width(),
            kv: cache.view(),
            items: items.as_view(),
            readers: readers.as_view(),
            policy,
            scratch: &mut scratch,
            spec,
        })?;
    }
    Ok(out)
}

/// With fixed pieces a sequence's result must not depend on the batch, to the last bit.
fn independence(gpu: &mut Gpu, spec: AttentionSpec, format: KvFormat) -> Result<Outcome, KernelError> {
    // In one case a block of threads takes one piece, in the other one takes all of them.
    let (spread, in_turn) = (SplitPolicy::fixed(4096, 264), SplitPolicy::fixed(4096, 1));
    let lens = [1000, 40, 2000, 7];
    let width = spec.heads.qkv_width();
    let cache = Cache::new(gpu, &apart(&lens), spec.heads, format)?;
    let q = gpu.noise.normals(lens.len() * width);
    let together = run_decode(gpu, &cache, &q, &lens, (spec, in_turn))?;
    let alone = run_decode(gpu, &cache, &q[..width], &lens[..1], (spec, spread))?;
    let equal = matches!((&together, &alone), (Some(together), Some(alone)) if together[..alone.len()] == alone[..]);
    let error = if equal { 0.0 } else { f64::INFINITY };
    Ok(Outcome {
        op: "paged_decode",
        case: format!("{}, {format:?}: a sequence alone", describe(spec)),
        error,
        limit: 0.0,
    })
}

/// Sixteen sequences behind one prefix, read together as far as their heads allow. What one of them has in its own values, NaN or
/// infinity, changes no bit of the others.
fn neighbours(gpu: &mut Gpu, spec: AttentionSpec, (value, format): (f32, KvFormat)) -> Result<Outcome, KernelError> {
    const N: usize = 16;
    const PREFIX_BLOCKS: usize = 37;
    const SICK: usize = 5;
    let heads = spec.heads;
    let lens: Vec<usize> = (0..N).map(|row| PREFIX_BLOCKS * BLOCK_SIZE + 20 + 7 * row).collect();
    let sequences: Vec<Sequence> = lens.iter().map(|&len| (len, Some((0, PREFIX_BLOCKS)))).collect();
    let mut cache = Cache::new(gpu, &sequences, heads, format)?;
    let q = gpu.noise.normals(N * heads.qkv_width());
    let how = (spec, SplitPolicy::Balanced { n_slots: heads.n_kv });
    let healthy = run_decode(gpu, &cache, &q, &lens, how)?;
    for token in PREFIX_BLOCKS * BLOCK_SIZE..lens[SICK] {
        let block = cache.table[SICK * cache.blocks_per_row + token / BLOCK_SIZE] as usize;
        for head in 0..heads.n_kv {
            let at = reference::cache_offset(block * BLOCK_SIZE + token % BLOCK_SIZE, head, heads);
            cache.stored[1][at..at + heads.dim].fill(value);
        }
    }
    cache.on_device.0 = uploaded(gpu, &cache.stored, &cache.scales, cache.format)?;
    let beside = run_decode_unchecked(gpu, &cache, &q, &lens, how)?;
    let width = heads.n_q * heads.dim;
    let healthy = healthy.unwrap_or_default();
    let sick = beside.chunks(width).nth(SICK).is_some_and(|row| row.iter().all(|x| !x.is_finite()));
    let rows = healthy.chunks(width).zip(beside.chunks(width)).enumerate();
    let n_changed = rows.filter(|(row, (before, after))| *row != SICK && before != after).count();
    // Were the sick one healthy, the check would see nothing.
    let error = if sick && healthy.len() == N * width { n_changed as f64 } else { f64::INFINITY };
    let case = format!("{}, {format:?}: {value} in the values of one of {N} read together", describe(spec));
    Ok(Outcome { op: "paged_decode", case, error, limit: 0.0 })
}

/// `chunks` are (tokens computed before, tokens of the chunk).
fn prefill(
    gpu: &mut Gpu,
    chunks: &[(usize, usize)],
    (spec, kernel): (AttentionSpec, PrefillKernel),
    format: KvFormat,
) -> Result<Outcome, KernelError> {
    let heads = spec.heads;
    let lens: Vec<usize> = chunks.iter().map(|(before, n)| before + n).collect();
    let cache = Cache::new(gpu, &apart(&lens), heads, format)?;
    let mut planned = Vec::new();
    let mut n_rows = 0;
    for (sequence, &(n_computed, n_tokens)) in chunks.iter().enumerate() {
        planned.push(PrefillChunk { sequence, first_row: n_rows, n_computed, n_tokens });
        n_rows += n_tokens;
    }
    let q = gpu.noise.normals(n_rows * heads.qkv_width());
    let q_gpu = queries(gpu, &q, format)?;
    let mut tiles = plan::plan_prefill(&planned, heads, kernel.split());
    // As a captured graph has them.
    tiles.extend([PrefillTile::NONE; SURPLUS_TILES]);
    let tiles = gpu.upload(&tiles)?;
    let n_pieces = plan::prefill_pieces_max(heads, kernel.split());
    let mut scratch = PrefillScratch::new(gpu.stream(), n_pieces, heads)?;
    let mut out = gpu.poisoned(n_rows * heads.n_q * heads.dim)?;
    // Twice: the second launch finds the tickets as the first one left them.
    for _ in 0..2 {
        let op = PagedPrefill {
            out: out.view(),
            q: q_gpu.as_view(),
            q_stride: heads.qkv_width(),
            kv: cache.view(),
            tiles: tiles.as_view(),
            scratch: &mut scratch,
            spec,
        };
        gpu.kernels.paged_prefill_by(op, kernel)?;
    }
    let row_of = |chunk: &PrefillChunk, token| (chunk.first_row + token, chunk.sequence, chunk.n_computed + token + 1);
    let rows: Vec<Row> =
        planned.iter().flat_map(|chunk| (0..chunk.n_tokens).map(move |token| row_of(chunk, token))).collect();
    let wanted = cache.attend_all(&q, &rows, spec);
    let error = gpu.written(&out)?.map_or(f64::INFINITY, |found| relative_error(&widened(&found), &wanted));
    let case = format!("{} chunks, {n_rows} rows, {}, {kernel:?}, {format:?}", chunks.len(), describe(spec));
    Ok(Outcome { op: "paged_prefill", case, error, limit: LIMIT })
}

fn describe(spec: AttentionSpec) -> String {
    let AttentionSpec { heads, window, softcap, .. } = spec;
    let window = window.map_or(String::new(), |window| format!(", window {window}"));
    let softcap = softcap.map_or(String::new(), |cap| format!(", cap {cap}"));
    format!("{} / {} heads of {}{window}{softcap}", heads.n_q, heads.n_kv, heads.dim)
}
