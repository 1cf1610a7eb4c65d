//! Every operation, naively, in f32 on the CPU: the oracle that kernels are tested against. Rounds to bf16 where the model's
//! definition stores bf16. Never fast, never used for serving.

use std::collections::BTreeMap;

use half::bf16;
use stoker_fit::gpu::SUM_DIGITS;

use crate::{
    codes,
    draw::Draw,
    launch::{AttentionSpec, BLOCK_SIZE, GATE_UP_GROUP, GemmShape, Heads, NormWeight},
    quantise::E4M3_MAX,
    sampling::{NO_TOKEN, SampleRow, TokenEdit},
};

/// The value as bf16 stores it.
pub fn rounded(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// The nearest number of e4m3 (OCP 8-bit floating point, 2023), even where two are as near; what is larger than all becomes the largest.
pub fn e4m3(x: f32) -> f32 {
    // Three digits behind the first one, down to the least exponent.
    let exponent = x.abs().max(2f32.powi(-6)).log2().floor() as i32;
    let exponent = if 2f32.powi(exponent) > x.abs().max(2f32.powi(-6)) { exponent - 1 } else { exponent };
    let step = 2f32.powi(exponent - 3);
    ((x / step).round_ties_even() * step).clamp(-E4M3_MAX, E4M3_MAX)
}

/// The byte that stands for a number of e4m3.
pub fn bits_of_e4m3(x: f32) -> u8 {
    let is_it = |bits: &u8| codes::e4m3(*bits).to_bits() == x.to_bits();
    (0..=u8::MAX).find(is_it).expect("a number of e4m3 has a byte")
}

/// The sum of 128 numbers up to [`BESIDE_CODES_MAX`](crate::quantise::BESIDE_CODES_MAX) with the opposite sign, as numbers of e4m3 that add up to it, exactly: eight
/// times an eighth, then what is left four times.
pub fn sum_digits(sum: f32) -> [u8; SUM_DIGITS] {
    let mut digits = [0; SUM_DIGITS];
    let eighth = e4m3(-sum / 8.0);
    digits[..8].fill(bits_of_e4m3(eighth));
    let mut left = -sum - 8.0 * eighth;
    for digit in &mut digits[8..12] {
        let next = e4m3(left);
        *digit = bits_of_e4m3(next);
        left -= next;
    }
    digits
}

/// Numbers of e4m3 up to `most`, and the scale of each row.
pub fn quantise_rows(x: &[f32], width: usize, most: f32) -> (Vec<f32>, Vec<f32>) {
    let row = |row: &[f32]| {
        let largest = row.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        let scale = if largest > 0.0 { largest / most } else { 1.0 };
        (row.iter().map(|x| e4m3(x / scale)).collect::<Vec<_>>(), scale)
    };
    let (rows, scales): (Vec<_>, Vec<_>) = x.chunks(width).map(row).unzip();
    (rows.concat(), scales)
}

/// Weights of four bits as e4m3, and the scale of each output, by codes, and scale and zero point of each group of an output: the scale
/// is by the largest that codes may stand for.
pub fn widened_int4(codes: &[u8], groups: &[(f32, u8)], (k, group): (usize, usize)) -> (Vec<f32>, Vec<f32>) {
    let n_groups = k.div_ceil(group);
    let output = |(codes, groups): (&[u8], &[(f32, u8)])| {
        let largest = |(scale, zero): &(f32, u8)| scale.abs() * f32::from((*zero).max(15 - zero));
        let largest = groups.iter().map(largest).fold(0.0, f32::max);
        let row_scale = if largest > 0.0 { largest / E4M3_MAX } else { 1.0 };
        let number = |(at, code): (usize, &u8)| {
            let (scale, zero) = groups[at / group];
            e4m3((f32::from(*code) - f32::from(zero)) * (scale / row_scale))
        };
        (codes.iter().enumerate().map(number).collect::<Vec<_>>(), row_scale)
    };
    let (outputs, scales): (Vec<_>, Vec<_>) = codes.chunks(k).zip(groups.chunks(n_groups)).map(output).unzip();
    (outputs.concat(), scales)
}

/// Rows of the table; zeros for a token outside it.
pub fn embed(table: &[f32], tokens: &[u32], width: usize) -> Vec<f32> {
    let zeros = vec![0.0; width];
    let row = |&token: &u32| table.chunks(width).nth(token as usize).unwrap_or(&zeros).to_vec();
    tokens.iter().flat_map(row).collect()
}

/// `x / sqrt(mean(x^2) + eps)`, rounded, times the weight, by rows.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    norm(x, weight, NormWeight::Factor, eps)
}

/// The same; where the weight is stored less one, the norm is not rounded before it is multiplied.
pub fn norm(x: &[f32], weight: &[f32], stored: NormWeight, eps: f32) -> Vec<f32> {
    let row = |row: &[f32]| {
        let mean = row.iter().map(|x| x * x).sum::<f32>() / row.len() as f32;
        let scale = 1.0 / (mean + eps).sqrt();
        let normed = |(x, w): (&f32, &f32)| match stored {
            NormWeight::Factor => rounded(x * scale) * w,
            NormWeight::OnePlusFactor => x * scale * (1.0 + w),
        };
        row.iter().zip(weight).map(normed).collect::<Vec<_>>()
    };
    x.chunks(weight.len()).flat_map(row).collect()
}

/// `cap * tanh(x / cap)`.
pub fn softcap(x: f32, cap: f32) -> f32 {
    cap * (x / cap).tanh()
}

/// The sum as the residual stream stores it.
pub fn add(x: &[f32], residual: &[f32]) -> Vec<f32> {
    x.iter().zip(residual).map(|(x, r)| rounded(x + r)).collect()
}

/// `silu(gate) * up` of groups of gate, each with its group of up behind it.
pub fn silu_mul(gate_up: &[f32]) -> Vec<f32> {
    let group = |group: &[f32]| {
        let (gate, up) = group.split_at(GATE_UP_GROUP);
        gate.iter().zip(up).map(|(g, u)| rounded(g / (1.0 + (-g).exp())) * u).collect::<Vec<_>>()
    };
    gate_up.chunks(2 * GATE_UP_GROUP).flat_map(group).collect()
}

/// `gelu(gate) * up` by the tanh approximation, in the same layout.
pub fn gelu_mul(gate_up: &[f32]) -> Vec<f32> {
    let gelu = |x: f32| 0.5 * x * (1.0 + ((2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh());
    let group = |group: &[f32]| {
        let (gate, up) = group.split_at(GATE_UP_GROUP);
        gate.iter().zip(up).map(|(g, u)| rounded(gelu(*g)) * u).collect::<Vec<_>>()
    };
    gate_up.chunks(2 * GATE_UP_GROUP).flat_map(group).collect()
}

/// x (m x k) times the transpose of w (n x k).
pub fn linear(x: &[f32], w: &[f32], shape: GemmShape) -> Vec<f32> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() as f32;
    x.chunks(shape.k).flat_map(|x| w.chunks(shape.k).map(move |w| dot(x, w))).collect()
}

/// Residual rows as a product of few rows leaves them for the norm behind it: times its weight, and sums of squares of 16 values
/// each.
pub fn weighted(residual: &[f32], weight: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let rows = residual.chunks(weight.len());
    let weighted = rows.clone().flat_map(|row| row.iter().zip(weight).map(|(h, g)| rounded(h * g))).collect();
    let sum = |tile: &[f32]| tile.iter().map(|h| f64::from(*h) * f64::from(*h)).sum::<f64>() as f32;
    (weighted, rows.flat_map(|row| row.chunks(16).map(sum)).collect())
}

/// x times the transpose of w, with the norm's factor of each row of x behind: what `rms_norm`, then `linear` would be without
/// rounding, if x is the weighted residual.
pub fn scaled_linear(x: &[f32], squares: &[f32], eps: f32, w: &[f32], shape: GemmShape) -> Vec<f32> {
    let scale = |squares: &[f32]| {
        let sum: f64 = squares.iter().copied().map(f64::from).sum();
        (sum / shape.k as f64 + f64::from(eps)).sqrt().recip() as f32
    };
    let products = linear(x, w, shape);
    let scales = squares.chunks(shape.k.div_ceil(16)).map(scale);
    products.chunks(shape.n).zip(scales).flat_map(|(row, scale)| row.iter().map(move |y| y * scale)).collect()
}

/// One fused QKV row after bias, qk-norm and rotation.
#[derive(Clone, Debug)]
pub struct RopeRow<'a> {
    /// The row.
    pub qkv: &'a [f32],
    /// Added first.
    pub bias: Option<&'a [f32]>,
    /// Weights of query and key heads, and epsilon.
    pub norm: Option<(&'a [f32], &'a [f32], f32)>,
    /// How these weights are stored.
    pub norm_weight: NormWeight,
    /// Cosines, then sines, of the row's position: as many numbers as turn.
    pub angles: &'a [f32],
    /// Heads.
    pub heads: Heads,
}

/// The row's q heads, k heads and v heads, in the row's own order.
pub fn rope(row: &RopeRow<'_>) -> Vec<f32> {
    let Heads { n_q, n_kv, dim } = row.heads;
    let biased: Vec<f32> = match row.bias {
        Some(bias) => row.qkv.iter().zip(bias).map(|(x, b)| rounded(x + b)).collect(),
        None => row.qkv.to_vec(),
    };
    let head = |(idx, head): (usize, &[f32])| {
        let weight = row.norm.map(|(q, k, eps)| (if idx < n_q { q } else { k }, eps));
        match (idx < n_q + n_kv, weight) {
            (false, _) => head.to_vec(),
            (true, None) => rotate(head, row.angles),
            (true, Some((weight, eps))) => {
                let normed: Vec<f32> = norm(head, weight, row.norm_weight, eps).into_iter().map(rounded).collect();
                rotate(&normed, row.angles)
            }
        }
    };
    biased.chunks(dim).enumerate().flat_map(head).collect()
}

fn rotate(head: &[f32], angles: &[f32]) -> Vec<f32> {
    let half = angles.len() / 2;
    let (turning, rest) = head.split_at(2 * half);
    let (low, high) = turning.split_at(half);
    let (cos, sin) = angles.split_at(half);
    let first = (0..half).map(|i| low[i] * cos[i] - high[i] * sin[i]);
    let second = (0..half).map(|i| high[i] * cos[i] + low[i] * sin[i]);
    first.chain(second).chain(rest.iter().copied()).collect()
}

/// Where a slot's head begins in a cache.
pub fn cache_offset(slot: usize, head: usize, heads: Heads) -> usize {
    ((slot / BLOCK_SIZE * heads.n_kv + head) * BLOCK_SIZE + slot % BLOCK_SIZE) * heads.dim
}

/// One query token's attention over the first `n_visible` tokens of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct AttentionRow<'a> {
    /// Query heads x dim.
    pub q: &'a [f32],
    /// The layer's keys.
    pub k_cache: &'a [f32],
    /// The layer's values.
    pub v_cache: &'a [f32],
    /// The sequence's block ids.
    pub blocks: &'a [i32],
    /// Tokens seen.
    pub n_visible: usize,
    /// How it attends.
    pub spec: AttentionSpec,
}

/// Softmax attention, one row.
pub fn attention(row: &AttentionRow<'_>) -> Vec<f32> {
    let AttentionSpec { heads, scale, window, softcap: cap } = row.spec;
    let dim = heads.dim;
    let first = row.n_visible.saturating_sub(window.unwrap_or(row.n_visible));
    let at = |token: usize, kv_head: usize| {
        let slot = row.blocks[token / BLOCK_SIZE] as usize * BLOCK_SIZE + token % BLOCK_SIZE;
        cache_offset(slot, kv_head, heads)
    };
    let head = |(idx, q): (usize, &[f32])| {
        let kv_head = idx / heads.group();
        let scores: Vec<f32> = (first..row.n_visible)
            .map(|token| {
                let k = &row.k_cache[at(token, kv_head)..][..dim];
                let score = q.iter().zip(k).map(|(q, k)| q * k).sum::<f32>() * scale;
                cap.map_or(score, |cap| softcap(score, cap))
            })
            .collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|score| (score - max).exp()).collect();
        let total: f32 = weights.iter().sum();
        let mut out = vec![0.0; dim];
        for (token, weight) in (first..).zip(&weights) {
            let v = &row.v_cache[at(token, kv_head)..][..dim];
            out.iter_mut().zip(v).for_each(|(out, v)| *out += weight / total * v);
        }
        out
    };
    row.q.chunks(dim).enumerate().flat_map(head).collect()
}

/// What of a row's options changes single logits.
#[derive(Clone, Copy, Debug)]
pub struct RowHistory<'a> {
    /// Tokens.
    pub prompt: &'a [u32],
    /// Tokens.
    pub completion: &'a [u32],
    /// Biases and bans.
    pub edits: &'a [TokenEdit],
    /// One bit a token, set if it is allowed.
    pub mask: Option<&'a [u32]>,
}

/// The logits as a row's penalties, biases, bans and mask change them.
pub fn edited(logits: &[f32], row: SampleRow, history: RowHistory<'_>) -> Vec<f32> {
    let mut edited = logits.to_vec();
    let mut counts: BTreeMap<u32, u32> = history.prompt.iter().map(|token| (*token, 0)).collect();
    history.completion.iter().for_each(|token| *counts.entry(*token).or_default() += 1);
    for (token, n_generated) in counts {
        let logit = &mut edited[token as usize];
        *logit = if *logit > 0.0 { *logit / row.repetition } else { *logit * row.repetition };
        if n_generated > 0 {
            *logit -= row.frequency * n_generated as f32 + row.presence;
        }
    }
    for edit in history.edits {
        let is_banned = row.position < u64::from(edit.banned_until);
        let logit = &mut edited[edit.token as usize];
        *logit = if is_banned { f32::NEG_INFINITY } else { *logit + edit.bias };
    }
    for (run, word) in edited.chunks_mut(32).zip(history.mask.unwrap_or_default()) {
        let forbidden = run.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
        forbidden.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
    }
    edited
}

/// Log-probability of `token`, and of the `n_top` likeliest, best first, of equals the lowest.
pub fn logprobs(logits: &[f32], token: u32, n_top: usize) -> (f64, Vec<(u32, f64)>) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total = logits.iter().map(|logit| f64::from(logit - max).exp()).sum::<f64>().ln() + f64::from(max);
    let mut ranked: Vec<(u32, f64)> = (0..).zip(logits.iter().map(|logit| f64::from(*logit) - total)).collect();
    ranked.sort_by(|(a, x), (b, y)| y.total_cmp(x).then(a.cmp(b)));
    ranked.truncate(n_top);
    (f64::from(logits[token as usize]) - total, ranked)
}

/// The token of one row, by sorting. [`NO_TOKEN`] if a logit is NaN.
pub fn sample(logits: &[f32], row: SampleRow) -> u32 {
    if logits.iter().any(|logit| logit.is_nan()) {
        return NO_TOKEN;
    }
    if row.temperature == 0.0 {
        return first_largest(logits.iter().copied().map(Some));
    }
    let tempered: Vec<f32> = logits.iter().map(|logit| logit / row.temperature).collect();
    let floor = floor(&tempered, row);
    let noise = Draw::new(row.seed, row.position);
    let score = |(token, t): (usize, &f32)| (*t >= floor).then(|| t + noise.gumbel(token as u32));
    first_largest(tempered.iter().enumerate().map(score))
}

fn first_largest(scores: impl Iterator<Item = Option<f32>>) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (token, score) in scores.enumerate() {
        if let Some(score) = score
            && score > best.0
        {
            best = (score, token as u32);
        }
    }
    best.1
}

/// The smallest tempered logit that all filters keep.
pub fn floor(tempered: &[f32], row: SampleRow) -> f32 {
    let mut sorted = tempered.to_vec();
    sorted.sort_unstable_by(|a, b| b.total_cmp(a));
    let max = sorted[0];
    if row.top_k > 0 {
        sorted.truncate(row.top_k as usize);
    }
    let mass = |t: &f32| f64::from((t - max).exp());
    let wanted = f64::from(row.top_p) * sorted.iter().map(mass).sum::<f64>();
    let mut sum = 0.0;
    let last = sorted.iter().find(|t| {
        sum += mass(t);
        row.top_p < 1.0 && sum >= wanted
    });
    let ranked = row.top_k > 0 || row.top_p < 1.0;
    let rank_floor = last.copied().or(sorted.last().copied().filter(|_| ranked)).unwrap_or(f32::NEG_INFINITY);
    rank_floor.max(max + row.ln_min_p)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantise::BESIDE_CODES_MAX;

    #[test]
    fn attention_over_equal_keys_is_the_mean_of_the_values() {
        let heads = Heads { n_q: 1, n_kv: 1, dim: 2 };
        let v_cache: Vec<f32> = (0..2 * 2 * BLOCK_SIZE).map(|i| i as f32).collect();
        let row = AttentionRow {
            q: &[1.0, 1.0],
            k_cache: &vec![0.0; v_cache.len()],
            v_cache: &v_cache,
            blocks: &[1, 0],
            n_visible: 2,
            spec: AttentionSpec::plain(heads, 1.0),
        };
        // Tokens 0 and 1 lie in block 1: values (32, 33) and (34, 35).
        assert_eq!(attention(&row), [33.0, 34.0]);
        let newest = AttentionSpec { window: Some(1), ..row.spec };
        assert_eq!(attention(&AttentionRow { spec: newest, ..row }), [34.0, 35.0]);
    }

    #[test]
    fn digits_add_up_to_the_sum_whatever_it_is() {
        // What 128 numbers may add up to: multiples of the smallest one.
        let (most, step) = (128.0 * BESIDE_CODES_MAX, 2f32.powi(-9));
        let n = (most / step) as u32;
        for nth in (0..n).step_by(251).chain(n - 2000..=n).chain(0..2000) {
            let sum = nth as f32 * step;
            for sum in [sum, -sum] {
                let found: f32 = sum_digits(sum).into_iter().map(codes::e4m3).sum();
                assert_eq!(found, -sum);
            }
        }
    }

    #[test]
    fn a_number_becomes_the_nearest_of_e4m3_or_of_two_the_one_with_an_even_last_digit() {
        let numbers: Vec<(u8, f32)> = (0..0x7f).map(|bits| (bits, codes::e4m3(bits))).collect();
        assert_eq!((numbers[1].1, numbers[8].1, numbers[0x7e].1), (2f32.powi(-9), 2f32.powi(-6), E4M3_MAX));
        let nearest = |x: f32| {
            let distance = |number: &f32| (f64::from(*number) - f64::from(x)).abs();
            let key = |(bits, number): &&(u8, f32)| (distance(number), bits & 1);
            numbers.iter().min_by(|a, b| key(a).partial_cmp(&key(b)).unwrap()).unwrap().1
        };
        let mut noise = crate::noise::Noise(7);
        let sizes = (0..2000).map(|i| 2f32.powi(i % 22 - 12));
        let some = noise.normals(2000).into_iter().zip(sizes).map(|(x, size)| (x * size).abs());
        let halfway = numbers.windows(2).map(|two| f32::midpoint(two[0].1, two[1].1));
        for x in some.chain(halfway).chain([0.0, 1e-9, 448.0, 500.0]) {
            assert_eq!((e4m3(x), e4m3(-x)), (nearest(x), -nearest(x)), "{x}");
            assert_eq!(codes::e4m3(bits_of_e4m3(-nearest(x))), -nearest(x));
        }
    }

    #[test]
    fn a_row_has_one_scale_and_a_row_of_zeros_has_one_too() {
        let (numbers, scales) = quantise_rows(&[1.0, -2.0, 0.0, 0.0], 2, E4M3_MAX);
        assert_eq!((numbers, scales), (vec![224.0, -448.0, 0.0, 0.0], vec![2.0 / 448.0, 1.0]));
    }

    #[test]
    fn four_bits_are_widened_by_the_largest_that_their_codes_may_stand_for() {
        // The largest are 15 * 2 of the first output, 9 * 1 of the second.
        let (numbers, scales) =
            widened_int4(&[0, 15, 8, 2, 6, 9, 0, 6], &[(2.0, 0), (-1.0, 8), (0.5, 6), (1.0, 6)], (4, 2));
        assert_eq!(scales, [30.0 / 448.0, 9.0 / 448.0]);
        // -1 * (2 - 8) of 30 is 89.6: of numbers 8 apart from each other the nearest is 88.
        assert_eq!(numbers, [0.0, 448.0, 0.0, 88.0, 0.0, e4m3(74.666), -288.0, 0.0]);
    }

    #[test]
    fn a_bounded_score_weighs_less() {
        let heads = Heads { n_q: 1, n_kv: 1, dim: 1 };
        let (mut k_cache, mut v_cache) = (vec![0.0; BLOCK_SIZE], vec![0.0; BLOCK_SIZE]);
        (k_cache[1], v_cache[1]) = (3.0, 1.0);
        let spec = AttentionSpec { softcap: Some(2.0), ..AttentionSpec::plain(heads, 1.0) };
        let row = AttentionRow { q: &[1.0], k_cache: &k_cache, v_cache: &v_cache, blocks: &[0], n_visible: 2, spec };
        let expected = 1.0 / (1.0 + (-2.0 * 1.5f32.tanh()).exp());
        assert!((attention(&row)[0] - expected).abs() < 1e-6);
    }

    #[test]
    fn a_floor_keeps_what_its_filter_keeps() {
        let tempered = [0.05f32, 0.15, 0.3, 0.5].map(f32::ln);
        let row = SampleRow { temperature: 1.0, ..SampleRow::GREEDY };
        let kept = |row| tempered.iter().filter(|t| **t >= floor(&tempered, row)).count();
        assert_eq!(kept(row), 4);
        assert_eq!(kept(SampleRow { top_k: 2, ..row }), 2);
        assert_eq!(kept(SampleRow { top_p: 0.81, ..row }), 3);
        assert_eq!(kept(SampleRow { top_k: 3, top_p: 0.5, ..row }), 1);
        assert_eq!(kept(SampleRow { ln_min_p: 0.5f32.ln(), ..row }), 2);
    }

    #[test]
    fn rotation_by_a_right_angle_swaps_the_halves_of_what_turns() {
        assert_eq!(rotate(&[1.0, 2.0, 3.0, 4.0], &[0.0, 0.0, 1.0, 1.0]), [-3.0, -4.0, 1.0, 2.0]);
        assert_eq!(rotate(&[1.0, 2.0, 3.0, 4.0], &[0.0, 1.0]), [-2.0, 1.0, 3.0, 4.0]);
    }
}
