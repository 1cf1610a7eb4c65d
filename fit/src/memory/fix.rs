//! What makes a model fit that does not: each a change of settings which alone is enough. Words only; `memory` finds them.

use std::fmt;

use super::{DeviceMemory, mib};

/// A change that makes a model fit.
#[derive(Clone, Debug, PartialEq)]
pub enum Fix {
    /// Lower `max_model_len` to this many tokens.
    ShortenContext(u64),
    /// Raise `kv_cache_tokens` to this.
    EnlargeCache(u64),
    /// Lower `kv_cache_tokens` to this.
    ShrinkCache(u64),
    /// Set `max_model_len` and `kv_cache_tokens` to this many tokens.
    SetBoth(u64),
    /// Raise `memory_fraction` to this.
    RaiseFraction(f64),
    /// Raise the memory that the process may use to this many bytes.
    RaiseLimit(u64),
    /// Only with another GPU.
    LargerGpu {
        /// What is needed.
        needed_bytes: u64,
        /// The one there is.
        memory: DeviceMemory,
    },
}

impl fmt::Display for Fix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ShortenContext(tokens) => write!(f, "lower max_model_len to {tokens}"),
            Self::EnlargeCache(tokens) => write!(f, "raise kv_cache_tokens to at least {tokens}"),
            Self::ShrinkCache(tokens) => write!(f, "lower kv_cache_tokens to {tokens}"),
            Self::SetBoth(tokens) => write!(f, "set max_model_len and kv_cache_tokens to {tokens}"),
            Self::RaiseFraction(fraction) => write!(f, "raise memory_fraction to at least {fraction}"),
            Self::RaiseLimit(bytes) => write!(f, "raise the memory limit to at least {}", mib(*bytes)),
            Self::LargerGpu { needed_bytes, memory } => {
                let DeviceMemory { total_bytes, taken_bytes } = *memory;
                let [needed, total, taken] = [*needed_bytes, total_bytes, taken_bytes].map(mib);
                write!(
                    f,
                    "use a larger GPU: no memory_fraction is enough, {needed} are needed and this one has {total}, of \
                     which {taken} are taken"
                )
            }
        }
    }
}

/// Ways to the same end, the cheapest first.
#[derive(Clone, Debug, PartialEq)]
pub struct Fixes(pub Vec<Fix>);

impl fmt::Display for Fixes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ways: Vec<_> = self.0.iter().map(Fix::to_string).collect();
        f.write_str(&ways.join(", or "))
    }
}
