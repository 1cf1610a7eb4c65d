//! Which instructions kernels are made of: found on this CPU, called by name, never one that is not there. Chooses no
//! kernel; that is [`Isa::run`] of the modules that have some.

use std::{fmt, str::FromStr};

/// A set of instructions that this CPU has: there is no way to one that it lacks.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Isa(pub(super) Set);

/// Instructions that kernels are made of, best first.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Set {
    /// AVX-512 with its dot products, and the tile unit of AMX for bf16: Sapphire Rapids and later.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// AVX-512 with its dot products of bf16 and of bytes: Cooper Lake, Sapphire Rapids, Zen 4.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// AVX-512 with its dot product of bytes: Cascade Lake, Ice Lake.
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    /// AVX-512: Skylake-X.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 with its dot product of bytes: Alder Lake.
    #[cfg(target_arch = "x86_64")]
    Avx2Vnni,
    /// AVX2 with FMA: Haswell, Zen.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// NEON with dot products of bf16 and with matrices of bytes: Neoverse V1 and N2 (Graviton 3), Grace, Apple M2.
    #[cfg(target_arch = "aarch64")]
    NeonBf16,
    /// NEON with its dot product of bytes: Neoverse N1, Apple M1.
    #[cfg(target_arch = "aarch64")]
    NeonDot,
    /// NEON: every 64-bit Arm.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// What the compiler makes of plain Rust.
    Portable,
}

/// A name that is no set of this CPU.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct NoSuchIsa<'a> {
    /// What was asked for.
    pub name: &'a str,
    /// Whether another CPU of this architecture has a set of that name.
    pub is_known: bool,
}

impl Isa {
    /// The best this CPU has.
    pub fn best() -> Self {
        Self::available()[0]
    }

    /// All this CPU has, best first; plain Rust is always among them. A hypervisor may hide some.
    pub fn available() -> Vec<Self> {
        Set::ALL.iter().copied().filter(|set| set.is_here()).map(Self).collect()
    }

    /// The set of that name.
    ///
    /// # Errors
    /// This CPU has none of that name.
    pub fn named(name: &str) -> Result<Self, NoSuchIsa<'_>> {
        let known = Set::ALL.iter().find(|set| set.name() == name);
        let here = known.filter(|set| set.is_here());
        here.map(|set| Self(*set)).ok_or(NoSuchIsa { name, is_known: known.is_some() })
    }

    /// As users write it.
    pub fn name(self) -> &'static str {
        self.0.name()
    }
}

impl Set {
    #[cfg(target_arch = "x86_64")]
    const ALL: &[Self] =
        &[Self::Amx, Self::Avx512Bf16, Self::Avx512Vnni, Self::Avx512, Self::Avx2Vnni, Self::Avx2, Self::Portable];
    #[cfg(target_arch = "aarch64")]
    const ALL: &[Self] = &[Self::NeonBf16, Self::NeonDot, Self::Neon, Self::Portable];
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    const ALL: &[Self] = &[Self::Portable];

    fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => "amx",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => "avx512-bf16",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Vnni => "avx2-vnni",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Self::NeonBf16 => "neon-bf16",
            #[cfg(target_arch = "aarch64")]
            Self::NeonDot => "neon-dot",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "neon",
            Self::Portable => "portable",
        }
    }

    /// Whether this CPU has it, and the operating system keeps its registers.
    fn is_here(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Self::Avx512Bf16.is_here() && super::amx::is_here(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Self::Avx512Vnni.is_here() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => Self::Avx512.is_here() && is_x86_feature_detected!("avx512vnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_here()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx2Vnni => Self::Avx2.is_here() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "aarch64")]
            Self::NeonBf16 => {
                Self::NeonDot.is_here()
                    && std::arch::is_aarch64_feature_detected!("bf16")
                    && std::arch::is_aarch64_feature_detected!("i8mm")
            }
            #[cfg(target_arch = "aarch64")]
            Self::NeonDot => Self::Neon.is_here() && std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            Self::Portable => true,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Self::named(name).map_err(|error| error.to_string())
    }
}

impl fmt::Display for NoSuchIsa<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let here = Isa::available().into_iter().map(Isa::name).collect::<Vec<_>>().join(", ");
        let Self { name, is_known } = self;
        match is_known {
            true => write!(f, "this CPU has no {name} (or its hypervisor hides it): it has {here}"),
            false => write!(f, "{name:?} is no instruction set: this CPU has {here}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_of_this_cpu_is_found_by_its_name() {
        for isa in Isa::available() {
            assert_eq!(isa.name().parse(), Ok(isa));
        }
        assert_eq!(Isa::available().last().map(|isa| isa.name()), Some("portable"));
    }

    #[test]
    fn a_name_that_is_none_and_a_set_that_is_not_here_are_told_apart() {
        let refusal = "avx-2".parse::<Isa>().unwrap_err();
        assert!(refusal.contains("\"avx-2\" is no instruction set") && refusal.contains("portable"), "{refusal}");
        for set in Set::ALL.iter().filter(|set| !set.is_here()) {
            let refusal = Isa::named(set.name()).unwrap_err();
            assert!(refusal.is_known && refusal.to_string().contains("this CPU has no"), "{refusal}");
        }
        assert!(!Isa::named("").unwrap_err().is_known);
    }
}
