//! Curves that numbers go through one by one. Never mixes two numbers of a row.

use crate::ops::Activation;

/// `gate = activation(gate) * up`.
pub(super) fn apply_mul(activation: Activation, gate: &mut [f32], up: &[f32]) {
    // One loop a curve: the choice is made once a row, and each loop is one the compiler can vectorise.
    match activation {
        Activation::Silu => map_mul(gate, up, |x| x / (1.0 + (-x).exp())),
        Activation::GeluTanh => map_mul(gate, up, gelu_tanh),
    }
}

/// `x = cap * tanh(x / cap)`.
pub(super) fn softcap(values: &mut [f32], cap: f32) {
    for value in values {
        *value = cap * (*value / cap).tanh();
    }
}

fn map_mul(gate: &mut [f32], up: &[f32], curve: impl Fn(f32) -> f32) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = curve(*gate) * up;
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
    fn the_curves_have_their_known_values() {
        let at = |activation, x| {
            let mut gate = [x];
            apply_mul(activation, &mut gate, &[2.0]);
            gate[0] / 2.0
        };
        assert_eq!(at(Activation::Silu, 0.0), 0.0);
        assert!((at(Activation::Silu, 1.0) - 0.731_058_6).abs() < 1e-6);
        assert!((at(Activation::GeluTanh, 1.0) - 0.841_192).abs() < 1e-6);
        assert!((at(Activation::GeluTanh, -1.0) + 0.158_808).abs() < 1e-6);
    }

    #[test]
    fn a_softcap_leaves_small_numbers_and_bounds_large_ones() {
        let mut values = [0.01, 1e9, -1e9];
        softcap(&mut values, 30.0);
        assert!((values[0] - 0.01).abs() < 1e-7);
        assert_eq!(values[1..], [30.0, -30.0]);
    }
}
