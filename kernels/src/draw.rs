//! The randomness of a draw: Gumbel noise that is a function of (seed, position, token) and nothing else (D9). The one
//! definition on the host, for the reference and for the engine's CPU sampler; `csrc/sample.cu` is the device's.

/// What a token's noise can be at most: `u` is at most 1 - 2^-24, and -ln(-ln(u)) below this.
pub const GUMBEL_MAX: f32 = 16.64;

/// The noise of one position of one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    stream: u64,
}

impl Draw {
    /// The noise at `position` of a request with this seed.
    pub fn new(seed: u64, position: u64) -> Self {
        Self { stream: mix(mix(seed).wrapping_add(position)) }
    }

    /// The middle of one of 2^23 equal steps between 0 and 1, both excluded.
    pub fn uniform(self, token: u32) -> f32 {
        let bits = mix(self.stream.wrapping_add(u64::from(token))) >> 41;
        (bits as f32 + 0.5) / (1u32 << 23) as f32
    }

    /// Standard Gumbel noise: the token with the largest sum of logit and noise is a draw from the softmax.
    pub fn gumbel(self, token: u32) -> f32 {
        -(-self.uniform(token).ln()).ln()
    }
}

/// One step of SplitMix64 (Steele, Lea, Flood 2014): increment, then finaliser.
fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_numbers_fill_the_open_interval_for_neighbouring_seeds_positions_and_tokens() {
        let n = 10_000;
        // Four standard deviations of a mean of uniform numbers.
        let bound = 4.0 * (1.0f64 / 12.0 / f64::from(n)).sqrt();
        let along: [fn(u32) -> f32; 3] = [
            |i| Draw::new(i.into(), 7).uniform(9),
            |i| Draw::new(3, i.into()).uniform(9),
            |i| Draw::new(3, 7).uniform(i),
        ];
        for along in along {
            assert!((0..n).all(|i| along(i) > 0.0 && along(i) < 1.0));
            let mean = (0..n).map(|i| f64::from(along(i))).sum::<f64>() / f64::from(n);
            assert!((mean - 0.5).abs() < bound, "{mean}");
        }
    }

    #[test]
    fn no_noise_is_above_its_bound() {
        let largest = 1.0 - 0.5 / (1u32 << 23) as f32;
        let bound = -(-largest.ln()).ln();
        assert!(bound < GUMBEL_MAX && bound > GUMBEL_MAX - 0.01, "{bound}");
    }

    #[test]
    fn the_hash_is_the_published_splitmix64() {
        // The first two outputs of the authors' generator seeded with 1234567.
        assert_eq!(mix(1_234_567), 6_457_827_717_110_365_317);
        assert_eq!(mix(1_234_567_u64.wrapping_add(0x9e37_79b9_7f4a_7c15)), 3_203_168_211_198_807_973);
    }
}
