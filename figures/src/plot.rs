//! Pictures as SVG: bars of ratios, and lines through labelled points. Owns drawing; chooses no figure.

use std::fmt::Write as _;

/// A ratio with its range.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Bar {
    /// What stands beside it.
    pub label: String,
    /// What its colour means.
    pub series: String,
    /// Median, smallest and largest; all above zero.
    pub value: f64,
    pub min: f64,
    pub max: f64,
}

/// Points that belong together, in the order in which they are joined.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Line {
    /// What its colour means.
    pub series: String,
    pub points: Vec<Point>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Point {
    pub x: f64,
    pub y: f64,
    /// What stands at it.
    pub label: String,
}

/// What the axes of a picture say.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Titles<'a> {
    pub picture: &'a str,
    pub x: &'a str,
    pub y: &'a str,
}

const WIDTH: f64 = 860.0;
const LEFT: f64 = 250.0;
const RIGHT: f64 = 60.0;
const TOP: f64 = 56.0;
const ROW: f64 = 20.0;
const CURVE_LEFT: f64 = 70.0;
const CURVE_HEIGHT: f64 = 340.0;
const COLOURS: [&str; 5] = ["#0b6e4f", "#5b5f97", "#e09f3e", "#c1121f", "#777777"];

/// One bar a row on a logarithmic axis, from 1 to the right where ahead and to the left where behind.
pub(crate) fn bars(title: &str, bars: &[Bar]) -> String {
    let height = TOP + ROW * bars.len() as f64 + 30.0;
    let (low, high) = octaves(bars);
    let x = |ratio: f64| LEFT + (WIDTH - LEFT - RIGHT) * (ratio.log2() - low) / (high - low);
    let series = names(bars.iter().map(|bar| bar.series.as_str()));
    let mut text = opened(title, height) + &legend(&series, LEFT);
    let mut octave = low;
    while octave <= high {
        let (at, stroke) = (x(octave.exp2()), if octave == 0.0 { "#333" } else { "#ddd" });
        let _ = writeln!(text, "<path d=\"M{at:.1} {TOP}V{:.1}\" stroke=\"{stroke}\"/>", height - 26.0);
        let _ = writeln!(text, "<text x=\"{at:.1}\" y=\"{:.1}\" {MIDDLE}>{}x</text>", height - 10.0, octave.exp2());
        octave += 1.0;
    }
    for (idx, bar) in bars.iter().enumerate() {
        text += &row(bar, TOP + ROW * idx as f64, &x, colour_of(&series, &bar.series));
    }
    text + "</svg>\n"
}

const MIDDLE: &str = "text-anchor=\"middle\" fill=\"#777\"";
const END: &str = "text-anchor=\"end\"";

fn row(bar: &Bar, top: f64, x: &dyn Fn(f64) -> f64, colour: &str) -> String {
    let (from, to) = (x(bar.value.min(1.0)), x(bar.value.max(1.0)));
    let middle = top + ROW / 2.0;
    format!(
        "<text x=\"{:.1}\" y=\"{:.1}\" {END}>{}</text>\n\
         <rect x=\"{from:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{colour}\"/>\n\
         <path d=\"M{:.1} {middle:.1}H{:.1}\" stroke=\"black\"/>\n\
         <text x=\"{:.1}\" y=\"{:.1}\">{:.2}</text>\n",
        LEFT - 8.0,
        middle + 4.0,
        bar.label,
        top + 4.0,
        to - from,
        ROW - 8.0,
        x(bar.min),
        x(bar.max),
        x(bar.max).max(to) + 6.0,
        middle + 4.0,
        bar.value
    )
}

/// Whole powers of two that all bars and 1 lie between.
fn octaves(bars: &[Bar]) -> (f64, f64) {
    let low = bars.iter().map(|bar| bar.min.log2().floor()).fold(-1.0, f64::min);
    let high = bars.iter().map(|bar| bar.max.log2().ceil()).fold(1.0, f64::max);
    (low, high)
}

/// Lines through labelled points; both axes begin at zero.
pub(crate) fn curve(titles: Titles<'_>, lines: &[Line]) -> String {
    let points = || lines.iter().flat_map(|line| &line.points);
    let right = nice(points().map(|point| point.x).fold(0.0, f64::max));
    let most = nice(points().map(|point| point.y).fold(0.0, f64::max));
    let x = |value: f64| CURVE_LEFT + (WIDTH - CURVE_LEFT - RIGHT) * value / right;
    let y = |value: f64| TOP + CURVE_HEIGHT * (1.0 - value / most);
    let series = names(lines.iter().map(|line| line.series.as_str()));
    let mut text = opened(titles.picture, TOP + CURVE_HEIGHT + 50.0) + &legend(&series, CURVE_LEFT);
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let (across, up) = (x(right * share), y(most * share));
        let _ = writeln!(text, "<path d=\"M{CURVE_LEFT} {up:.1}H{:.1}\" stroke=\"#ddd\"/>", WIDTH - RIGHT);
        let _ =
            writeln!(text, "<text x=\"{:.1}\" y=\"{:.1}\" {END}>{}</text>", CURVE_LEFT - 6.0, up + 4.0, most * share);
        let _ = writeln!(
            text,
            "<text x=\"{across:.1}\" y=\"{:.1}\" {MIDDLE}>{}</text>",
            TOP + CURVE_HEIGHT + 18.0,
            right * share
        );
    }
    for line in lines {
        text += &joined(line, &x, &y, colour_of(&series, &line.series));
    }
    let _ = writeln!(text, "<text x=\"{:.1}\" y=\"{:.1}\" {END}>{}</text>", WIDTH - RIGHT, TOP - 8.0, titles.y);
    let _ = writeln!(
        text,
        "<text x=\"{:.1}\" y=\"{:.1}\" {END}>{}</text>",
        WIDTH - RIGHT,
        TOP + CURVE_HEIGHT + 38.0,
        titles.x
    );
    text + "</svg>\n"
}

fn joined(line: &Line, x: &dyn Fn(f64) -> f64, y: &dyn Fn(f64) -> f64, colour: &str) -> String {
    let mut path = String::new();
    let mut marks = String::new();
    for (idx, point) in line.points.iter().enumerate() {
        let (x, y) = (x(point.x), y(point.y));
        let _ = write!(path, "{}{x:.1} {y:.1}", if idx == 0 { 'M' } else { 'L' });
        let _ = writeln!(marks, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
        let _ = writeln!(
            marks,
            "<text x=\"{:.1}\" y=\"{:.1}\" fill=\"{colour}\">{}</text>",
            x + 6.0,
            y + 12.0,
            point.label
        );
    }
    format!("<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.6\"/>\n{marks}")
}

/// The next number whose quarters are round.
fn nice(value: f64) -> f64 {
    let ten = 10_f64.powf(value.max(f64::MIN_POSITIVE).log10().floor());
    let steps = [1.0, 1.2, 1.6, 2.0, 4.0, 6.0, 8.0, 10.0];
    steps.into_iter().map(|step| step * ten).find(|end| *end >= value).unwrap_or(value)
}

fn opened(title: &str, height: f64) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"12\" y=\"20\" font-size=\"15\">{title}</text>\n"
    )
}

fn legend(series: &[&str], left: f64) -> String {
    series.iter().enumerate().fold(String::new(), |mut text, (idx, name)| {
        let x = left + 150.0 * idx as f64;
        let _ = writeln!(
            text,
            "<rect x=\"{x}\" y=\"32\" width=\"12\" height=\"8\" fill=\"{}\"/>",
            COLOURS[idx % COLOURS.len()]
        );
        let _ = writeln!(text, "<text x=\"{}\" y=\"40\">{name}</text>", x + 18.0);
        text
    })
}

/// Names once each, in order.
fn names<'a>(all: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    all.fold(Vec::new(), |mut names, name| {
        if !names.contains(&name) {
            names.push(name);
        }
        names
    })
}

fn colour_of(series: &[&str], name: &str) -> &'static str {
    COLOURS[series.iter().position(|known| *known == name).unwrap_or(0) % COLOURS.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bar(value: f64) -> Bar {
        Bar { label: "decode".into(), series: "peer".into(), value, min: value * 0.9, max: value * 1.1 }
    }

    /// Numbers after `name="` in a text.
    fn numbers(text: &str, name: &str) -> Vec<f64> {
        let before = format!(" {name}=\"");
        text.split(&before).skip(1).map(|part| part.split('"').next().unwrap().parse().unwrap()).collect()
    }

    #[test]
    fn bars_grow_to_the_right_where_ahead_and_to_the_left_where_behind() {
        let text = bars("t", &[bar(2.0), bar(0.5)]);
        let bars: Vec<&str> = text.lines().filter(|line| line.contains("height=\"12.0\"")).collect();
        let (ahead, behind) = (numbers(bars[0], "x")[0], numbers(bars[1], "x")[0] + numbers(bars[1], "width")[0]);
        assert_eq!(bars.len(), 2);
        assert!((ahead - behind).abs() < 0.2, "both begin at 1: {text}");
        assert!(
            (numbers(bars[0], "width")[0] - numbers(bars[1], "width")[0]).abs() < 0.2,
            "twice and half alike: {text}"
        );
    }

    #[test]
    fn the_axis_holds_every_bar_and_one() {
        assert_eq!(octaves(&[bar(1.05)]), (-1.0, 1.0));
        assert_eq!(octaves(&[bar(0.4), bar(19.0)]), (-2.0, 5.0));
    }

    #[test]
    fn axes_end_at_a_round_number_that_holds_all() {
        assert_eq!([3.1, 14.4, 10_400.0, 0.7, 8.0].map(nice), [4.0, 16.0, 12_000.0, 0.8, 8.0]);
    }

    #[test]
    fn a_line_goes_through_its_points_in_order() {
        let point = |x, y| Point { x, y, label: "8".into() };
        let line = Line { series: "stoker".into(), points: vec![point(0.0, 0.0), point(2.0, 4.0)] };
        let text = curve(Titles { picture: "t", x: "ms", y: "tok/s" }, &[line]);
        let (left, bottom) = (CURVE_LEFT, TOP + CURVE_HEIGHT);
        assert!(text.contains(&format!("M{left:.1} {bottom:.1}L{:.1} {TOP:.1}", WIDTH - RIGHT)), "{text}");
    }
}
