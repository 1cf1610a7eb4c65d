//! The service curve of an engine, twice: measured by steps of fixed shape (`point`), and as the engine's own meter learned it from
//! a mixed open load (`load`); and the two beside each other (`compare`). Fixed shapes are timed before and after the load, so that
//! a machine that changes meanwhile shows. Judges nothing.

mod compare;
mod load;
mod point;

use anyhow::{Context, Result, ensure};
use stoker_cost::StepReport;
use stoker_engine::StepSizes;

use crate::in_process::{InProcess, Setup};
pub use compare::{Comparison, Sizes};
pub use point::Point;

use self::{
    load::Stretch,
    point::{Bench, Timed},
};

/// What is measured and how.
#[derive(Clone, Debug)]
pub struct Asked {
    /// The engine, with the sizes that a deployment gives it.
    pub setup: Setup,
    /// Sequences that decode together.
    pub sequences: Vec<u32>,
    /// Tokens before each of them.
    pub contexts: Vec<u32>,
    /// Tokens of prompts.
    pub prompts: Vec<u32>,
    /// Tokens that the sequences of one point may have together: what is larger is left out.
    pub point_tokens: u32,
    /// Samples of each point, before the load and again after it.
    pub samples: usize,
    /// Seconds of load.
    pub load_seconds: f64,
}

/// Measures, serves, measures again. `progress` is told of every part.
pub fn measure(asked: &Asked, progress: &mut dyn FnMut(&str)) -> Result<Comparison> {
    let mut engine = InProcess::open(&asked.setup)?;
    let sizes = sizes(&engine, asked.setup.limits.max_batched_tokens);
    let points = asked.points(&sizes)?;
    let mut timed = points.iter().map(|point| Timed::new(*point)).collect::<Vec<_>>();
    time(&mut engine, &mut timed, asked.samples, progress)?;
    drop(engine);
    // The meter of an engine that was asked for fixed shapes has learned from them.
    let mut engine = InProcess::open(&asked.setup)?;
    let stretches = load::stretches(&timed, asked.load_seconds, asked.setup.seed);
    progress(&format!("load: {:.0} s in {} stretches", asked.load_seconds, stretches.len()));
    let (seen, learned) = served(&mut engine, &stretches, asked.setup.seed)?;
    time(&mut engine, &mut timed, asked.samples, progress)?;
    Comparison::new(timed, &seen, learned, sizes)
        .context("the load had too few steps to learn from: give it more --seconds")
}

fn served(engine: &mut InProcess, stretches: &[Stretch], seed: u64) -> Result<(load::Seen, StepReport)> {
    let arrivals = load::arrivals(stretches, engine.engine().model().max_model_len, seed);
    let seen = load::serve(engine, &arrivals, stretches.iter().map(|stretch| stretch.seconds).sum())?;
    Ok((seen, engine.engine().load().step_report))
}

fn time(engine: &mut InProcess, timed: &mut [Timed], samples: usize, progress: &mut dyn FnMut(&str)) -> Result<()> {
    progress(&format!("{} shapes: prompts are computed", timed.len()));
    let points: Vec<Point> = timed.iter().map(|timed| timed.point).collect();
    let mut bench = Bench::new(engine, &points)?;
    for _ in 0..samples {
        for timed in timed.iter_mut() {
            let seconds = bench.sample(timed.point).with_context(|| timed.point.to_string())?;
            progress(&format!("{}: {:.3} ms", timed.point, seconds * 1e3));
            timed.seconds.push(seconds);
        }
    }
    Ok(())
}

fn sizes(engine: &InProcess, asked: Option<u32>) -> Sizes {
    let model = engine.engine().model();
    let defaults = if model.device.starts_with("cpu") { StepSizes::CPU } else { StepSizes::GPU };
    Sizes {
        blocks: engine.engine().load().total_blocks,
        max_batched_tokens: asked.unwrap_or(defaults.max_batched_tokens.max(model.max_num_seqs)),
        max_num_seqs: model.max_num_seqs,
        max_model_len: model.max_model_len,
    }
}

impl Asked {
    /// What of the grid the engine holds and nobody left out; an error if that is nothing.
    fn points(&self, sizes: &Sizes) -> Result<Vec<Point>> {
        let decodes = self.sequences.iter().flat_map(|sequences| {
            self.contexts.iter().map(|context| Point::Decode { sequences: *sequences, context: *context })
        });
        let points = decodes.chain(self.prompts.iter().map(|tokens| Point::Prompt { tokens: *tokens }));
        let points: Vec<Point> = points.filter(|point| point.fits(sizes, self.point_tokens)).collect();
        let is_there = |wanted: fn(&Point) -> bool| points.iter().any(wanted);
        ensure!(
            is_there(|point| matches!(point, Point::Decode { .. }))
                && is_there(|point| matches!(point, Point::Prompt { .. })),
            "no point is left that {} tokens of context, {} sequences and {} KV blocks hold: give smaller --sequences, \
             --contexts and --prompts",
            sizes.max_model_len,
            sizes.max_num_seqs,
            sizes.blocks
        );
        Ok(points)
    }
}
