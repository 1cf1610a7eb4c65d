//! One picture of two topics: what a format of weights costs in answers against the tokens a second that it gives, ours and a peer's.
//! Chooses figures; draws nothing itself.

use crate::{
    figure::Figure,
    plot::{self, Line, Point, Titles},
    render::{Page, newest},
};

/// Where speeds are from: one stream of the shape that all formats were measured with, on one kind of GPU.
const GPU: &str = "H200";
const MODEL: &str = "llama-3.1-8b";
const CASE: &str = "single_stream";
/// What a format costs: how far its next tokens stray from bf16's.
const LOSS: &str = "kl";

/// The picture, where both kinds of figures are there.
pub(crate) fn picture(quality: &[Figure], speed: &[Figure]) -> Option<Page> {
    let losses: Vec<Figure> = newest(quality.to_vec())
        .into_iter()
        .filter(|figure| figure.metric == LOSS && figure.system == "stoker")
        .collect();
    let model = &losses.first()?.model;
    let speeds = newest(speed.iter().filter(|figure| figure.case == CASE && figure.gpu() == GPU).cloned().collect());
    let of = |system: &str| {
        let points = losses.iter().filter_map(|loss| {
            let is_its = |figure: &&Figure| {
                (&*figure.system, &*figure.model, &*figure.metric, &*figure.dtype)
                    == (system, MODEL, "tok_s", runs_as(&loss.dtype))
            };
            let rate = speeds.iter().find(is_its)?;
            Some(Point { x: rate.value, y: 1000.0 * loss.value, label: loss.dtype.clone() })
        });
        Line { series: system.to_owned(), points: points.collect() }
    };
    // Points that nothing joins.
    let apart = |line: Line| {
        let Line { series, points } = line;
        points.into_iter().map(move |point| Line { series: series.clone(), points: vec![point] })
    };
    let lines: Vec<Line> = ["stoker", "vllm"].into_iter().map(of).flat_map(apart).collect();
    let x = format!("tokens a second of one stream, {MODEL} on one {GPU}");
    let y = format!("thousandths of a nat from bf16, {model}, by our engine");
    let titles = Titles { picture: "what a format costs, and what it gives", x: &x, y: &y };
    (!lines.is_empty()).then(|| ("quality-speed.svg".to_owned(), plot::curve(titles, &lines)))
}

/// The format of speeds that has that one's work: what made the numbers is no matter there. FP8 as stored has none: it is where FP8 made
/// at load is, and one would hide the other.
fn runs_as(dtype: &str) -> &str {
    if dtype.starts_with("int4") { "int4" } else { dtype }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(system: &str, model: &str, dtype: &str, case: &str, metric: &str, value: f64) -> Figure {
        Figure {
            run: "r".into(),
            commit: "c".into(),
            machine: "1x H200, driver 1".into(),
            system: system.into(),
            version: "1".into(),
            model: model.into(),
            dtype: dtype.into(),
            case: case.into(),
            metric: metric.into(),
            value,
            n: 1,
            min: value,
            max: value,
            command: "x".into(),
        }
    }

    #[test]
    fn a_format_stands_where_its_loss_and_each_systems_speed_are() {
        let quality = [("int4-gptq", 0.03), ("nf4", 0.05)]
            .map(|(dtype, value)| figure("stoker", "ember-100m", dtype, "quality_heldout", LOSS, value));
        let speed = [("stoker", 470.0), ("vllm", 250.0)]
            .map(|(system, value)| figure(system, MODEL, "int4", CASE, "tok_s", value));
        let (name, text) = picture(&quality, &speed).unwrap();
        assert_eq!(name, "quality-speed.svg");
        assert_eq!(text.matches("int4-gptq").count(), 2, "one for each system; what has no speed is left out: {text}");
        assert!(!text.contains("nf4") && text.contains("vllm"), "{text}");
        assert_eq!(picture(&[], &speed), None);
    }
}
