//! What was done and what it did: `quantize.json`, from which a run that was stopped goes on too, and a page for a browser.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use stoker_pages::report::{Course, Line, Report as Page, Section};

use crate::evaluate::Comparison;

/// How far a layer's projections are from the original: the root of the mean square of the difference of their outputs, as a share of that of
/// the outputs; without a calibration text of the weights. By projection.
pub type LayerErrors = BTreeMap<String, f64>;

/// All that is known of a run.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Report {
    /// What was asked for, in words; a run goes on only with the same.
    pub settings: BTreeMap<String, String>,
    /// Layers that are written, from the first on.
    pub layers: Vec<LayerErrors>,
    /// Both models on a text, if one was given.
    pub comparison: Option<Comparison>,
}

const ABOUT: &str = "Written by stoker-quantize. Errors are of a projection's outputs on the calibration text, as a share of the outputs; without \
                     one of its weights. Perplexities are of both models on the CPU, where what enters integers is rounded to eight bits too.";

/// The page.
pub fn html(report: &Report) -> String {
    let mut sections = vec![settings(report)];
    sections.extend(report.comparison.as_ref().map(answers));
    sections.push(layers(report));
    Page { title: "A quantised model".to_owned(), about: ABOUT.to_owned(), sections }.render()
}

fn settings(report: &Report) -> Section {
    Section {
        title: "What was done".to_owned(),
        columns: ["", ""].map(str::to_owned).to_vec(),
        rows: report.settings.iter().map(|(name, value)| vec![name.clone(), value.clone()]).collect(),
        ..Section::default()
    }
}

fn answers(comparison: &Comparison) -> Section {
    let Comparison { n_tokens, perplexity_before, perplexity_after, divergence, agreement } = comparison;
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    Section {
        title: format!("What it does to answers, on {n_tokens} tokens"),
        columns: ["What", "How much"].map(str::to_owned).to_vec(),
        rows: vec![
            row("Perplexity of the original", format!("{perplexity_before:.4}")),
            row("Perplexity of the quantised model", format!("{perplexity_after:.4}")),
            row("Mean divergence from the original, nats a token", format!("{divergence:.5}")),
            row("The same token is the likeliest", format!("{:.2} %", agreement * 100.0)),
        ],
        ..Section::default()
    }
}

fn layers(report: &Report) -> Section {
    let names: Vec<&String> = report.layers.first().map(|layer| layer.keys().collect()).unwrap_or_default();
    let percent = |layer: &LayerErrors, name: &String| layer.get(name).copied().unwrap_or_default() * 100.0;
    let row = |(idx, layer): (usize, &LayerErrors)| {
        let errors = names.iter().map(|name| format!("{:.3}", percent(layer, name)));
        std::iter::once(idx.to_string()).chain(errors).collect()
    };
    let line = |name: &&String| {
        let points = report.layers.iter().enumerate().map(|(idx, layer)| (idx as f64, percent(layer, name)));
        Line { name: (*name).clone(), points: points.collect() }
    };
    let courses = names.iter().map(|name| Course { name: format!("{name}, %"), lines: vec![line(name)] });
    Section {
        title: "Error of each projection by layer, %".to_owned(),
        columns: std::iter::once("Layer".to_owned()).chain(names.iter().map(|name| (*name).clone())).collect(),
        rows: report.layers.iter().enumerate().map(row).collect(),
        courses: if report.layers.len() > 1 { courses.collect() } else { Vec::new() },
        along: Some(format!("layer {}", report.layers.len().saturating_sub(1))),
        ..Section::default()
    }
}
