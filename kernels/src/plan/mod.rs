//! How attention is cut into pieces that the kernels take one each: contexts of decoding sequences, tokens of prefill
//! chunks. Pure: lengths and block tables in, pieces out; the host plans once a step and all layers use it.

mod decode;
mod prefill;
mod sharing;

pub use self::{
    decode::{Context, DecodeItem, DecodePlan, DecodeReader, SplitPolicy, decode_items_max, plan_decode},
    prefill::{PrefillChunk, PrefillSplit, PrefillTile, plan_prefill, prefill_pieces_max, prefill_tiles_max},
};

fn index(n: usize) -> i32 {
    i32::try_from(n).expect("rows and tokens of a step are below 2^31")
}
