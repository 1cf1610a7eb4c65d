//! Loops over single rows, written plainly: each is inlined into code compiled for an instruction set, where the
//! compiler makes vectors of it. Sums run in 16 lanes whatever the set, so all sets give the same bits.

use super::{Format, Isa, Kernel, lanes::Lanes};

const LANES: usize = 16;

/// `e^x` within 2 units in the last place, for `x` up to 88; below -87 it stays at `e^-87`.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`; a polynomial gives `e^r`, the exponent bits `2^n`. Without branches and
/// calls, so that a loop over it becomes vectors, which the system's `expf` prevents.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// 0.693359375, of so few bits that its product with `n` is exact; what is missing follows.
    const LN2_HIGH: f32 = f32::from_bits(0x3F31_8000);
    const LN2_LOW: f32 = -2.121_944_4e-4;
    /// Adding it rounds to an integer, which then lies in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // Not `clamp`, which the compiler does not turn into vector minimum and maximum.
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let e_r = p * r * r + r + 1.0;
    let two_n = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    e_r * two_n
}

/// `gate / (1 + e^-gate) * up`.
#[inline(always)]
fn silu_mul(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp(-*gate)) * up;
    }
}

/// `x / sqrt(mean(x^2) + eps) * weight`.
#[inline(always)]
fn norm(out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for x in chunks {
        for lane in 0..LANES {
            lanes[lane] += x[lane] * x[lane];
        }
    }
    let sum = rest.iter().fold(fold(lanes), |sum, x| sum + x * x);
    let scale = 1.0 / (sum / x.len() as f32 + eps).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * weight;
    }
}

/// `e^(score - largest)` for all scores, whose number is a multiple of 16. `-inf` gives next to nothing; who needs zero
/// writes it.
#[inline(always)]
pub(super) fn exp_below_max(scores: &mut [f32]) {
    let (chunks, rest) = scores.as_chunks_mut::<LANES>();
    assert!(rest.is_empty(), "scores come in whole blocks");
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for scores in chunks.iter() {
        for lane in 0..LANES {
            lanes[lane] = if scores[lane] > lanes[lane] { scores[lane] } else { lanes[lane] };
        }
    }
    let max = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
    for scores in chunks {
        for score in scores {
            *score = exp(*score - max);
        }
    }
}

/// The sum of numbers whose count is a multiple of 16.
#[inline(always)]
pub(super) fn sum(values: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for values in values.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            lanes[lane] += values[lane];
        }
    }
    fold(lanes)
}

/// The sum of the lanes, in halves: a tree that vector units fold in four steps.
#[inline(always)]
fn fold(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
    }
    lanes[0]
}

impl Isa {
    /// `gate = gate * sigmoid(gate) * up`.
    pub(in super::super) fn silu_mul(self, gate: &mut [f32], up: &[f32]) {
        self.run(Format::F32, SiluMul { gate, up });
    }

    /// `x / sqrt(mean(x^2) + eps) * weight`, into `out`.
    pub(in super::super) fn norm(self, out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
        self.run(Format::F32, Norm { out, x, weight, eps });
    }
}

struct SiluMul<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Kernel for SiluMul<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        silu_mul(self.gate, self.up);
    }
}

struct Norm<'a> {
    out: &'a mut [f32],
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for Norm<'_> {
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        norm(self.out, self.x, self.weight, self.eps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_within_two_units_in_the_last_place() {
        for i in -87_000..88_000 {
            let x = i as f32 / 1000.0;
            let exact = f64::from(x).exp();
            let relative = (f64::from(exp(x)) - exact).abs() / exact;
            assert!(relative <= 2.0 * f64::from(f32::EPSILON), "e^{x}: {relative}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NEG_INFINITY) < 1e-37 && exp(-1000.0) < 1e-37);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn silu_has_its_known_values_on_every_instruction_set() {
        for isa in Isa::available() {
            let mut gate = [0.0, 1.0, -1.0, 100.0, -100.0];
            isa.silu_mul(&mut gate, &[2.0; 5]);
            for (found, known) in gate.into_iter().zip([0.0, 0.731_058_6, -0.268_941_4, 100.0, 0.0]) {
                assert!((found - 2.0 * known).abs() < 1e-6, "{isa:?}: {found} is not {known}");
            }
        }
    }

    #[test]
    fn a_norm_has_mean_square_one_and_counts_every_number() {
        for len in [1, 15, 16, 17, 100] {
            let x: Vec<f32> = (0..len).map(|i| i as f32 - 3.5).collect();
            let mut out = vec![f32::NAN; len];
            norm(&mut out, &x, &vec![2.0; len], 0.0);
            let mean_square = out.iter().map(|x| x * x / 4.0).sum::<f32>() / len as f32;
            assert!((mean_square - 1.0).abs() < 1e-5, "{len}: {mean_square}");
        }
    }
}
