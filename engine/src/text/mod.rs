//! Between tokens and text: encoding prompts, decoding completions piece by piece, finding stop strings.
//! Runs on the callers' and the output thread, never on the engine thread.

mod assembler;
mod bounded;
mod detokenizer;
mod stop;
mod tokenizer;

pub(crate) use assembler::{TextAssembler, spell_logprobs};
pub use bounded::{EncodeError, EncodeLimit, SLICE_BYTES};
pub use detokenizer::Detokenizer;
pub use stop::{StopMatcher, StopScan};
pub use tokenizer::{Tokenizer, TokenizerError};
