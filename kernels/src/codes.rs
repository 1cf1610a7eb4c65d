//! Float codes of quantised safetensors and the numbers that they stand for. The reference for whoever unpacks them on a
//! device; scales are applied by others.
//!
//! ```text
//! e4m3   s eeee mmm   e > 0: (-1)^s 2^(e-7) (1 + m/8)   e = 0: (-1)^s 2^-6 (m/8)   eeee mmm all ones: not a number
//! e2m1   s ee m       e > 0: (-1)^s 2^(e-1) (1 + m/2)   e = 0: (-1)^s m/2
//! e8m0   eeeeeeee     2^(e-127)                                                    all ones: not a number
//! ```
//! E4m3 is the form without infinities (`e4m3fn`): its largest number is 448.

/// The number of a code of e4m3.
pub fn e4m3(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction * exp2(-6),
        _ => (1.0 + fraction) * exp2(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The number of a code of e2m1: the lower four bits.
pub fn e2m1(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 1 & 3), f32::from(code & 1) / 2.0);
    let magnitude = if exponent == 0 { fraction } else { (1.0 + fraction) * exp2(exponent - 1) };
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// The number of a code of e8m0: a power of two.
pub fn e8m0(code: u8) -> f32 {
    match code {
        u8::MAX => f32::NAN,
        _ => exp2(i32::from(code) - 127),
    }
}

/// A power of two that f32 has, if only as a subnormal number.
fn exp2(exponent: i32) -> f32 {
    let bits = if exponent < -126 { 1 << (exponent + 149) } else { (exponent + 127) << 23 };
    f32::from_bits(bits as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The formulas above in f64.
    fn by_formula(code: u8) -> f64 {
        let (sign, e, m) = (f64::from(code >> 7), f64::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = if e == 0.0 { 2f64.powi(-6) * (m / 8.0) } else { 2f64.powf(e - 7.0) * (1.0 + m / 8.0) };
        (1.0 - 2.0 * sign) * magnitude
    }

    #[test]
    fn every_code_is_the_number_of_its_formula() {
        for code in 0..=u8::MAX {
            match code & 0x7F {
                0x7F => assert!(e4m3(code).is_nan(), "{code:#x}"),
                _ => assert_eq!(f64::from(e4m3(code)), by_formula(code), "{code:#x}"),
            }
        }
        assert_eq!([0x7E, 0x01, 0x80, 0x38].map(e4m3), [448.0, 2f32.powi(-9), -0.0, 1.0]);
    }

    /// The list of the Open Compute Project's MX formats 1.0, table 5.
    #[test]
    fn codes_of_four_bits_are_those_of_the_specification() {
        let magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (code, magnitude) in (0..).zip(magnitudes) {
            assert_eq!([e2m1(code), e2m1(code | 8)].map(f32::to_bits), [magnitude, -magnitude].map(f32::to_bits));
        }
    }

    #[test]
    fn an_exponent_is_a_power_of_two_from_the_smallest_on() {
        for code in 0..u8::MAX {
            assert_eq!(f64::from(e8m0(code)), 2f64.powi(i32::from(code) - 127), "{code}");
        }
        assert!(e8m0(u8::MAX).is_nan());
    }
}
