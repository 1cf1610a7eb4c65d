//! Attention over the paged cache: decode and prefill at the shapes of Llama-3.1-8B, and with the heads, windows and soft-caps of other
//! families.

use anyhow::Result;
use stoker_kernels::{
    CudaSlice,
    attention::{DecodeScratch, PagedDecode, PagedKv, PagedPrefill, PrefillScratch, ScratchSize},
    cache::{KvFormat, LayerCache},
    checks::Gpu,
    launch::{AttentionSpec, BLOCK_SIZE, Heads, PrefillKernel},
    plan::{self, Context, PrefillChunk, SplitPolicy},
};

use crate::{
    cases::{HEADS, turns},
    clock,
    figures::{Report, Work},
};

const PLAIN: AttentionSpec = AttentionSpec { heads: HEADS, scale: 0.088, window: None, softcap: None };

/// Decode attention over contexts of equal and of random length.
pub(crate) fn decode(gpu: &mut Gpu, report: &mut Report) -> Result<()> {
    for (batch, context) in
        [(1, 1024), (1, 4096), (8, 1024), (8, 4096), (32, 1024), (32, 4096), (128, 1024), (256, 1024), (256, 4096)]
    {
        let name = format!("kernel_paged_decode_{batch}x{context}");
        let decodes = Decodes { lens: vec![context; batch], n_shared: 0, reading: Reading::Together };
        decode_case(gpu, report, &name, &decodes, (PLAIN, KvFormat::Bf16))?;
        decode_case(gpu, report, &format!("{name}_e4m3"), &decodes, (PLAIN, KvFormat::E4m3))?;
    }
    let lens: Vec<usize> = (0..256).map(|_| 64 + gpu.noise.below(4032)).collect();
    let ragged = Decodes { lens, n_shared: 0, reading: Reading::Together };
    decode_case(gpu, report, "kernel_paged_decode_256_ragged", &ragged, (PLAIN, KvFormat::Bf16))?;
    for (batch, n_shared, own) in [(2, 2048, 160), (8, 2048, 160), (64, 2048, 160), (256, 512, 384), (256, 256, 640)] {
        for (kind, reading) in [("shared", Reading::Together), ("shared_apart", Reading::Apart)] {
            let name = format!("kernel_paged_decode_{batch}x{own}_{kind}_{n_shared}");
            let lens = (0..batch).map(|row| n_shared + own - row % 16).collect();
            decode_case(gpu, report, &name, &Decodes { lens, n_shared, reading }, (PLAIN, KvFormat::Bf16))?;
        }
    }
    other_decodes(gpu, report)
}

/// Heads of other families: as wide as Gemma 2's with and without its window, as narrow as Phi-3's.
fn other_decodes(gpu: &mut Gpu, report: &mut Report) -> Result<()> {
    for (kind, spec) in other_specs() {
        for (batch, context) in [(1, 4096), (32, 1024), (128, 1024), (32, 8000)] {
            let name = format!("kernel_paged_decode_{kind}_{batch}x{context}");
            let decodes = Decodes { lens: vec![context; batch], n_shared: 0, reading: Reading::Together };
            decode_case(gpu, report, &name, &decodes, (spec, KvFormat::Bf16))?;
        }
    }
    Ok(())
}

fn other_specs() -> [(&'static str, AttentionSpec); 4] {
    let gemma = AttentionSpec::plain(Heads { n_q: 16, n_kv: 8, dim: 256 }, 0.0625);
    let capped = AttentionSpec { softcap: Some(50.0), ..gemma };
    [
        ("d256", gemma),
        ("d256_capped", capped),
        ("d256_capped_window4096", AttentionSpec { window: Some(4096), ..capped }),
        ("d96", AttentionSpec::plain(Heads { n_q: 32, n_kv: 32, dim: 96 }, 0.102)),
    ]
}

/// Sequences that decode.
struct Decodes {
    lens: Vec<usize>,
    /// Tokens that all of them begin with, in the same blocks.
    n_shared: usize,
    reading: Reading,
}

/// How blocks that several sequences share are read.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Reading {
    Together,
    Apart,
}

fn decode_case(
    gpu: &mut Gpu,
    report: &mut Report,
    name: &str,
    decodes: &Decodes,
    (spec, format): (AttentionSpec, KvFormat),
) -> Result<()> {
    if !report.wants(name) {
        return Ok(());
    }
    let Decodes { lens, n_shared, reading } = decodes;
    let n_slots = 2 * gpu.kernels.properties().n_multiprocessors as usize;
    // What is shared is in memory once.
    let heads = spec.heads;
    let seen = |len: usize| len.min(spec.window.unwrap_or(usize::MAX));
    let kv_tokens = n_shared + lens.iter().map(|&len| seen(len) - n_shared).sum::<usize>();
    let kv_bytes = 2 * format.bytes() * kv_tokens * heads.n_kv * heads.dim;
    let turns = turns(kv_bytes);
    let caches = (0..turns).map(|_| Cache::new(gpu, lens, *n_shared, heads, format)).collect::<Result<Vec<_>>>()?;
    let policy = SplitPolicy::Balanced { n_slots };
    // The blocks that a cache's sequences share are in the same places of all tables.
    let known = if *reading == Reading::Together { n_shared / BLOCK_SIZE } else { 0 };
    let blocks: Vec<usize> = (0..known).collect();
    let contexts: Vec<_> =
        lens.iter().map(|&n_tokens| Context { n_tokens, n_settled: n_tokens - 1, blocks: &blocks }).collect();
    let plan = plan::plan_decode(&contexts, heads, policy);
    let size = ScratchSize { n_sequences: lens.len(), n_items: plan.items.len(), policy, heads };
    let (items, readers) = (gpu.upload(&plan.items)?, gpu.upload(&plan.readers)?);
    let mut scratch = DecodeScratch::new(gpu.stream(), size)?;
    let (q, mut out) = (gpu.random(lens.len() * heads.qkv_width())?, gpu.random(lens.len() * heads.n_q * heads.dim)?);
    let us = clock::time(gpu, 20, |i| {
        gpu.kernels.paged_decode(PagedDecode {
            out: out.as_view_mut(),
            q: q.as_view(),
            q_stride: heads.qkv_width(),
            kv: caches[i % turns].view(),
            items: items.as_view(),
            readers: readers.as_view(),
            policy,
            scratch: &mut scratch,
            spec,
        })
    })?;
    report.add(name, "stoker", Work::Bytes(kv_bytes as f64), us);
    Ok(())
}

/// Causal attention of whole prompts, and of a chunk over a long past.
pub(crate) fn prefill(gpu: &mut Gpu, report: &mut Report) -> Result<()> {
    let best = PrefillKernel::for_device(gpu.kernels.properties());
    let mut kernels = vec![("mma", PrefillKernel::Mma)];
    if best != PrefillKernel::Mma {
        kernels.push(("wgmma", best));
    }
    for (kind, kernel) in kernels {
        for (batch, tokens) in [(1, 2048), (1, 8192), (16, 512)] {
            let name = format!("kernel_paged_prefill_{kind}_{batch}x{tokens}");
            prefill_case(gpu, report, &name, &vec![(0, tokens); batch], kernel, (PLAIN, KvFormat::Bf16))?;
            let name = format!("{name}_e4m3");
            prefill_case(gpu, report, &name, &vec![(0, tokens); batch], kernel, (PLAIN, KvFormat::E4m3))?;
        }
        for (before, tokens) in [(2048, 128), (8192 - 512, 512)] {
            let name = format!("kernel_paged_prefill_{kind}_{tokens}_over_{}", before + tokens);
            prefill_case(gpu, report, &name, &[(before, tokens)], kernel, (PLAIN, KvFormat::Bf16))?;
            let name = format!("{name}_e4m3");
            prefill_case(gpu, report, &name, &[(before, tokens)], kernel, (PLAIN, KvFormat::E4m3))?;
        }
        let name = format!("kernel_paged_prefill_{kind}_64x128_shared_2048");
        prefill_case(gpu, report, &name, &[(2048, 128); 64], kernel, (PLAIN, KvFormat::Bf16))?;
    }
    for (kind, spec) in other_specs() {
        let kernel = PrefillKernel::for_device(gpu.kernels.properties());
        for (before, tokens) in [(0, 2048), (0, 8192), (8192 - 512, 512)] {
            let name = format!("kernel_paged_prefill_{kind}_{tokens}_over_{}", before + tokens);
            prefill_case(gpu, report, &name, &[(before, tokens)], kernel, (spec, KvFormat::Bf16))?;
        }
    }
    Ok(())
}

/// Chunks behind the same tokens.
fn prefill_case(
    gpu: &mut Gpu,
    report: &mut Report,
    name: &str,
    chunks: &[(usize, usize)],
    kernel: PrefillKernel,
    (spec, format): (AttentionSpec, KvFormat),
) -> Result<()> {
    if !report.wants(name) {
        return Ok(());
    }
    let heads = spec.heads;
    let lens: Vec<usize> = chunks.iter().map(|(before, n)| before + n).collect();
    let n_rows = chunks.iter().map(|(_, n)| n).sum::<usize>();
    let mut first_row = 0;
    let planned: Vec<PrefillChunk> = chunks
        .iter()
        .enumerate()
        .map(|(sequence, &(n_computed, n_tokens))| {
            let chunk = PrefillChunk { sequence, first_row, n_computed, n_tokens };
            first_row += n_tokens;
            chunk
        })
        .collect();
    let (cache, tiles) = (
        Cache::new(gpu, &lens, chunks[0].0, heads, format)?,
        gpu.upload(&plan::plan_prefill(&planned, heads, kernel.split()))?,
    );
    let n_pieces = plan::prefill_pieces_max(heads, kernel.split());
    let mut scratch = PrefillScratch::new(gpu.stream(), n_pieces, heads)?;
    let (q, mut out) = (gpu.random(n_rows * heads.qkv_width())?, gpu.random(n_rows * heads.n_q * heads.dim)?);
    let us = clock::time(gpu, 4, |_| {
        let op = PagedPrefill {
            out: out.as_view_mut(),
            q: q.as_view(),
            q_stride: heads.qkv_width(),
            kv: cache.view(),
            tiles: tiles.as_view(),
            scratch: &mut scratch,
            spec,
        };
        gpu.kernels.paged_prefill_by(op, kernel)
    })?;
    // Two products of 2 * dim operations for each query head and pair of tokens that see each other.
    let seen = |position: usize| (position + 1).min(spec.window.unwrap_or(usize::MAX));
    let pairs = chunks.iter().flat_map(|&(before, n)| before..before + n).map(seen).sum::<usize>() as f64;
    report.add(name, "stoker", Work::Flops(4.0 * (heads.n_q * heads.dim) as f64 * pairs), us);
    Ok(())
}

/// Random KV in blocks of any order.
struct Cache {
    cache: LayerCache,
    table: CudaSlice<i32>,
    blocks_per_row: usize,
}

impl Cache {
    /// Sequences that begin with the same `n_shared` tokens.
    fn new(gpu: &mut Gpu, lens: &[usize], n_shared: usize, heads: Heads, format: KvFormat) -> Result<Self> {
        let blocks_per_row = lens.iter().max().map_or(1, |len| len.div_ceil(BLOCK_SIZE));
        let mut order = gpu.noise.permutation(lens.len() * blocks_per_row);
        for row in 1..lens.len() {
            order.copy_within(..n_shared / BLOCK_SIZE, row * blocks_per_row);
        }
        let size = order.len() * heads.block_values();
        let cache = match format {
            KvFormat::Bf16 => LayerCache::Bf16 { k: gpu.random(size)?, v: gpu.random(size)? },
            KvFormat::E4m3 => {
                let scales = gpu.upload(&vec![1.0; 2 * heads.n_kv])?;
                LayerCache::E4m3 { k: random_codes(gpu, size)?, v: random_codes(gpu, size)?, scales }
            }
        };
        Ok(Self { cache, table: gpu.upload(&order)?, blocks_per_row })
    }

    fn view(&self) -> PagedKv<'_> {
        let Self { cache, table, blocks_per_row } = self;
        PagedKv { cache, block_table: table.as_view(), blocks_per_row: *blocks_per_row }
    }
}

/// Codes of numbers up to 2: neither is any none, nor are weights all of one token.
fn random_codes(gpu: &mut Gpu, n: usize) -> Result<CudaSlice<u8>> {
    // No tile divides it: repeated, it never lines up with rows.
    const PIECE: usize = (1 << 20) - 24;
    let piece: Vec<u8> = (0..PIECE).map(|_| (gpu.noise.below(0x41) | gpu.noise.below(2) << 7) as u8).collect();
    let mut codes = piece.repeat(n.div_ceil(PIECE));
    codes.truncate(n);
    Ok(gpu.upload(&codes)?)
}
