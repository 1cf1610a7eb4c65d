//! Seeded random numbers. The generator is written out here because its sequence is part of every
//! published figure: a library may change its own between versions.

/// SplitMix64 (Steele, Lea, Flood 2014): one 64-bit state, passes BigCrush, trivially reproducible.
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// A generator for one purpose; equal seeds give equal sequences.
    pub fn seeded(seed: u64) -> Self {
        Self { state: seed }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in 0 (inclusive) to 1 (exclusive).
    pub fn uniform(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Exponential with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -(1.0 - self.uniform()).ln()
    }

    /// Standard normal (Box and Muller; the second value is thrown away to keep the state one number).
    pub fn normal(&mut self) -> f64 {
        let radius = (2.0 * self.exponential()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }

    /// Gamma with this shape and mean 1 (Marsaglia and Tsang 2000; below shape 1 by their power of a uniform). Gaps drawn
    /// from it vary by `1 / sqrt(shape)` times their mean.
    pub fn gamma(&mut self, shape: f64) -> f64 {
        if shape < 1.0 {
            let boost = self.uniform().max(f64::MIN_POSITIVE).powf(1.0 / shape);
            return self.gamma(shape + 1.0) * (shape + 1.0) / shape * boost;
        }
        let (d, c) = (shape - 1.0 / 3.0, 1.0 / (9.0 * shape - 3.0).sqrt());
        loop {
            let normal = self.normal();
            let cube = (1.0 + c * normal).powi(3);
            let is_kept = cube > 0.0 && self.exponential() > d * (cube - 1.0 - cube.ln()) - normal * normal / 2.0;
            if is_kept {
                return d * cube / shape;
            }
        }
    }

    /// Log-normal with this median and this standard deviation of the logarithm.
    pub fn log_normal(&mut self, median: f64, sigma: f64) -> f64 {
        median * (sigma * self.normal()).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_of_a_seed_never_changes() {
        let mut rng = Rng::seeded(0);
        assert_eq!([rng.bits(), rng.bits()], [0xe220_a839_7b1d_cdaf, 0x6e78_9e6a_a1b9_65f4]);
    }

    #[test]
    fn the_distributions_have_their_means() {
        let mut rng = Rng::seeded(7);
        let mean = |mut draw: Box<dyn FnMut() -> f64>| (0..100_000).map(|_| draw()).sum::<f64>() / 100_000.0;
        let mut other = rng.clone();
        assert!((mean(Box::new(move || rng.exponential())) - 1.0).abs() < 0.02);
        assert!(mean(Box::new(move || other.normal())).abs() < 0.02);
    }

    #[test]
    fn gamma_has_mean_one_and_the_variation_of_its_shape() {
        for shape in [0.04, 0.25, 1.0, 4.0] {
            let mut rng = Rng::seeded(11);
            let draws: Vec<f64> = (0..400_000).map(|_| rng.gamma(shape)).collect();
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            let variance = draws.iter().map(|draw| (draw - mean).powi(2)).sum::<f64>() / draws.len() as f64;
            // Five standard errors of the mean of a Gamma variable; its variance is 1 / shape.
            assert!((mean - 1.0).abs() < 5.0 / (shape * 400_000.0).sqrt(), "{shape}: mean {mean}");
            assert!((variance * shape - 1.0).abs() < 0.1, "{shape}: variance {variance}");
        }
    }
}
