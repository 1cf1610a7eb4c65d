//! Curves that numbers go through one by one. Never mixes two numbers of a row.

/// `gate = gelu(gate) * up`, by its tanh approximation.
pub(super) fn gelu_tanh_mul(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = gelu_tanh(*gate) * up;
    }
}

/// `x = cap * tanh(x / cap)`.
pub(super) fn softcap(values: &mut [f32], cap: f32) {
    for value in values {
        *value = cap * (*value / cap).tanh();
    }
}

fn gelu_tanh(x: f32) -> f32 {
    let root_two_over_pi = std::f32::consts::FRAC_2_SQRT_PI * std::f32::consts::FRAC_1_SQRT_2;
    0.5 * x * (1.0 + (root_two_over_pi * (x + 0.044_715 * x * x * x)).tanh())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gelu_has_its_known_values() {
        let mut gate = [0.0, 1.0, -1.0];
        gelu_tanh_mul(&mut gate, &[2.0; 3]);
        for (found, known) in gate.into_iter().zip([0.0, 0.841_192, -0.158_808]) {
            assert!((found - 2.0 * known).abs() < 1e-6);
        }
    }

    #[test]
    fn a_softcap_leaves_small_numbers_and_bounds_large_ones() {
        let mut values = [0.01, 1e9, -1e9];
        softcap(&mut values, 30.0);
        assert!((values[0] - 0.01).abs() < 1e-7);
        assert_eq!(values[1..], [30.0, -30.0]);
    }
}
