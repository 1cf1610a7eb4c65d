//! Benchmark figures: one JSON line each, appended to `docs/benchmarks/results/*.jsonl` and never edited (`figure`), and the
//! tables and pictures rendered from them (`render`); and readings over time for pages (`timeline`). Measures nothing.

mod figure;
mod peers;
mod plot;
mod render;
mod stats;
mod timeline;
mod trade;

pub use figure::{Conditions, Figure, Key, Run, System, append, gpus, read};
pub use peers::{BESIDE, Beside, beside_peers};
pub use render::{COLUMNS, Page, cells, newest, render};
pub use stats::{Better, better, median};
pub use timeline::{Moment, Series, Timeline, round_top};
