//! Pictures of runs: SVG for documents, rows of blocks for a terminal. Owns drawing; computes nothing about scaling.

use std::fmt::Write as _;

/// Values over time.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// What the legend says.
    pub name: String,
    /// Seconds and values, in order.
    pub points: Vec<(f64, f64)>,
}

/// One panel of a picture: series that share an axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Panel {
    /// What the axis says.
    pub label: String,
    /// Its lines.
    pub series: Vec<Series>,
}

const WIDTH: f64 = 860.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 44.0;
const PANEL: f64 = 120.0;
const GAP: f64 = 34.0;
const COLOURS: [&str; 5] = ["#0b6e4f", "#c1121f", "#e09f3e", "#5b5f97", "#777777"];
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Draws panels below each other over one time axis. Colours follow the order of the series within each panel.
pub fn svg(title: &str, panels: &[Panel]) -> String {
    let height = TOP + (PANEL + GAP) * panels.len() as f64;
    let end = panels.iter().flat_map(|panel| &panel.series).map(last_second).fold(1.0, f64::max);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" \
         font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n\
         <text x=\"{LEFT}\" y=\"18\" font-size=\"15\">{title}</text>\n"
    );
    text += &legend(panels);
    for (idx, panel) in panels.iter().enumerate() {
        text += &drawn(panel, TOP + (PANEL + GAP) * idx as f64, end);
    }
    text + "</svg>\n"
}

fn legend(panels: &[Panel]) -> String {
    let longest = panels.iter().max_by_key(|panel| panel.series.len());
    let names = longest.into_iter().flat_map(|panel| &panel.series).map(|series| series.name.as_str());
    names.enumerate().fold(String::new(), |mut text, (idx, name)| {
        let (x, colour) = (LEFT + 130.0 * idx as f64, COLOURS[idx % COLOURS.len()]);
        let _ = writeln!(text, "<rect x=\"{x}\" y=\"25\" width=\"12\" height=\"4\" fill=\"{colour}\"/>");
        let _ = writeln!(text, "<text x=\"{}\" y=\"32\">{name}</text>", x + 18.0);
        text
    })
}

fn drawn(panel: &Panel, top: f64, end: f64) -> String {
    let most = panel.series.iter().flat_map(|series| &series.points).map(|(_, value)| *value).fold(0.0, f64::max);
    let most = if most > 0.0 { most } else { 1.0 };
    let x = |at: f64| LEFT + (WIDTH - LEFT - RIGHT) * at / end;
    let y = |value: f64| top + 14.0 + PANEL * (1.0 - value / most);
    let mut text = format!("<text x=\"{LEFT}\" y=\"{:.0}\" fill=\"#333\">{}</text>\n", top + 8.0, panel.label);
    for share in [0.0, 0.5, 1.0] {
        let (value, at) = (share * most, y(share * most));
        let _ = writeln!(text, "<path d=\"M{LEFT} {at:.1}H{:.1}\" stroke=\"#ddd\"/>", WIDTH - RIGHT);
        let _ = writeln!(
            text,
            "<text x=\"{:.0}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT - 6.0,
            at + 4.0,
            short(value)
        );
    }
    for (idx, series) in panel.series.iter().enumerate() {
        let mut path = String::new();
        for (n, (at, value)) in series.points.iter().enumerate() {
            let _ = write!(path, "{}{:.1} {:.1}", if n == 0 { 'M' } else { 'L' }, x(*at), y(*value));
        }
        let colour = COLOURS[idx % COLOURS.len()];
        let _ = writeln!(text, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.4\"/>");
    }
    let _ = writeln!(
        text,
        "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\" fill=\"#777\">{:.0} min</text>",
        WIDTH - RIGHT,
        top + PANEL + 28.0,
        end / 60.0
    );
    text
}

/// One row per series: its name, its course in `columns` blocks, and its largest value.
pub fn rows(panel: &Panel, columns: usize) -> String {
    let most = panel.series.iter().flat_map(|series| &series.points).map(|(_, value)| *value).fold(0.0, f64::max);
    panel.series.iter().fold(format!("{} (up to {})\n", panel.label, short(most)), |mut text, series| {
        let bars: String = columned(series, columns).map(|value| bar(value, most)).collect();
        let _ = writeln!(text, "  {:<10} {bars}", series.name);
        text
    })
}

/// The largest value of each column, so that a short peak is not lost.
fn columned(series: &Series, columns: usize) -> impl Iterator<Item = f64> {
    let end = last_second(series).max(1.0);
    let mut most = vec![0.0_f64; columns];
    for (at, value) in &series.points {
        let column = ((at / end * columns as f64) as usize).min(columns - 1);
        most[column] = most[column].max(*value);
    }
    most.into_iter()
}

fn bar(value: f64, most: f64) -> char {
    if value <= 0.0 || most <= 0.0 {
        return ' ';
    }
    let level = (value / most * BARS.len() as f64).ceil() as usize;
    BARS[level.clamp(1, BARS.len()) - 1]
}

fn last_second(series: &Series) -> f64 {
    series.points.last().map_or(0.0, |(at, _)| *at)
}

fn short(value: f64) -> String {
    if value >= 10.0 || value == value.trunc() { format!("{value:.0}") } else { format!("{value:.2}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel() -> Panel {
        let points = (0..100).map(|at| (f64::from(at), if at == 50 { 8.0 } else { 1.0 })).collect();
        Panel { label: "replicas".to_owned(), series: vec![Series { name: "stoker".to_owned(), points }] }
    }

    #[test]
    fn a_short_peak_is_seen_in_a_row() {
        let text = rows(&panel(), 10);
        assert_eq!(text.lines().next(), Some("replicas (up to 8)"));
        assert_eq!(text.matches('█').count(), 1, "{text}");
    }

    #[test]
    fn a_picture_is_closed_and_has_one_line_a_series() {
        let text = svg("step", &[panel(), panel()]);
        assert!(text.starts_with("<svg ") && text.ends_with("</svg>\n"));
        assert_eq!(text.matches("stroke-width").count(), 2);
    }
}
