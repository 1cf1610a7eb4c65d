//! Readings over time as SVG shapes: lines with gaps where nothing is known, a target, moments. Draws no word: the shapes are
//! stretched to the width there is, and words would be too. Colours are the page's: shapes have classes, not styles.

use std::fmt::Write as _;

/// Units across and up; the picture is stretched from them.
const WIDTH: f64 = 1000.0;
const HEIGHT: f64 = 100.0;
/// Length of a point that stands alone.
const LONE: f64 = 8.0;

/// What is drawn, in milliseconds across.
#[derive(Clone, Debug)]
pub struct Timeline<'a> {
    /// From when.
    pub from_ms: u64,
    /// Until when.
    pub to_ms: u64,
    /// What the upper edge stands for.
    pub top: f64,
    /// The lines, the first at the bottom.
    pub series: &'a [Series],
    /// A level that means something.
    pub target: Option<f64>,
    /// Moments at which something happened.
    pub moments: &'a [Moment],
}

/// One line.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// Class of its shape.
    pub class: &'static str,
    /// Whether a value holds until the next one, as a number of replicas does.
    pub is_stepped: bool,
    /// When and what; nothing where nothing is known.
    pub points: Vec<(u64, Option<f64>)>,
}

/// Something that happened.
#[derive(Clone, Debug)]
pub struct Moment {
    /// When.
    pub at_ms: u64,
    /// What, for who points at it; empty where another picture of the same time says it.
    pub words: String,
    /// Where one reads about it.
    pub href: Option<String>,
    /// Whether one does now.
    pub is_open: bool,
}

impl Timeline<'_> {
    /// The picture. Says nothing to who cannot see: the page has its words.
    pub fn svg(&self) -> String {
        let mut text = format!(
            "<svg class=\"timeline\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" preserveAspectRatio=\"none\" aria-hidden=\"true\" focusable=\"false\">"
        );
        for level in [0.0, 50.0, 100.0] {
            let _ = write!(text, "<path class=\"grid\" d=\"M0 {level}H{WIDTH}\"/>");
        }
        if let Some(target) = self.target {
            let _ = write!(text, "<path class=\"target\" d=\"M0 {:.1}H{WIDTH}\"/>", self.y(target));
        }
        for series in self.series {
            let _ = write!(text, "<path class=\"line {}\" d=\"{}\"/>", series.class, self.path(series));
        }
        let seen = self.moments.iter().filter(|moment| (self.from_ms..=self.to_ms).contains(&moment.at_ms));
        let (plain, told): (Vec<&Moment>, Vec<&Moment>) = seen.partition(|moment| moment.words.is_empty());
        if !plain.is_empty() {
            let lines = plain.iter().map(|moment| format!("M{:.1} 0V{HEIGHT}", self.x(moment.at_ms)));
            let _ = write!(text, "<g class=\"moment\"><path d=\"{}\"/></g>", lines.collect::<String>());
        }
        told.into_iter().for_each(|moment| self.moment(&mut text, moment));
        text + "</svg>"
    }

    fn moment(&self, text: &mut String, moment: &Moment) {
        let class = if moment.is_open { "moment open" } else { "moment" };
        let x = self.x(moment.at_ms);
        let shape = format!(
            "<g class=\"{class}\"><title>{}</title><path class=\"reach\" d=\"M{x:.1} 0V{HEIGHT}\"/><path d=\"M{x:.1} 0V{HEIGHT}\"/></g>",
            escaped(&moment.words)
        );
        *text += &match &moment.href {
            Some(href) => format!("<a href=\"{}\" tabindex=\"-1\">{shape}</a>", escaped(href)),
            None => shape,
        };
    }

    /// Values that stay the same are one piece of line, however many there are.
    fn path(&self, series: &Series) -> String {
        let mut path = String::new();
        let mut before: Option<(u64, f64)> = None;
        for (idx, (at_ms, value)) in series.points.iter().enumerate() {
            let Some(value) = *value else {
                before = None;
                continue;
            };
            let next = series.points.get(idx + 1).and_then(|(_, next)| *next);
            let (x, y) = (self.x(*at_ms), self.y(value));
            match before {
                None => _ = write!(path, "M{x:.0} {y:.1}"),
                Some((_, same)) if same == value && next == Some(value) => {}
                Some((_, other)) if series.is_stepped && other != value => _ = write!(path, "H{x:.0}V{y:.1}"),
                Some((_, same)) if same == value => _ = write!(path, "H{x:.0}"),
                Some(_) => _ = write!(path, "L{x:.0} {y:.1}"),
            }
            // A point between two gaps has no length: it gets one that is seen, within the picture.
            if before.is_none() && next.is_none() {
                let length = if x < LONE { LONE } else { -LONE };
                _ = write!(path, "h{length:.0}");
            }
            before = Some((*at_ms, value));
        }
        path
    }

    fn x(&self, at_ms: u64) -> f64 {
        let span = self.to_ms.saturating_sub(self.from_ms).max(1) as f64;
        WIDTH * (at_ms.saturating_sub(self.from_ms) as f64 / span).min(1.0)
    }

    fn y(&self, value: f64) -> f64 {
        let share = if self.top > 0.0 { value / self.top } else { 0.0 };
        HEIGHT - (HEIGHT - 4.0) * share.clamp(0.0, 1.0) - 2.0
    }
}

/// The next number that is round enough to stand at an axis.
pub fn round_top(value: f64) -> f64 {
    let value = if value.is_finite() { value } else { 0.0 };
    let ten = 10_f64.powf(value.max(1e-3).log10().floor());
    [1.0, 2.0, 4.0, 5.0, 8.0, 10.0].into_iter().map(|step| step * ten).find(|end| *end >= value).unwrap_or(value)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(is_stepped: bool, points: &[(u64, Option<f64>)]) -> String {
        let series = Series { class: "a", is_stepped, points: points.to_vec() };
        let timeline = Timeline { from_ms: 0, to_ms: 1000, top: 10.0, series: &[], target: None, moments: &[] };
        timeline.path(&series)
    }

    #[test]
    fn a_line_breaks_where_nothing_is_known() {
        let points = [(0, Some(0.0)), (100, Some(10.0)), (200, None), (300, Some(5.0)), (400, None)];
        assert_eq!(path(false, &points), "M0 98.0L100 2.0M300 50.0h-8");
    }

    #[test]
    fn a_number_holds_until_the_next_one() {
        let points = [(0, Some(0.0)), (100, Some(0.0)), (200, Some(0.0)), (300, Some(10.0)), (400, Some(10.0))];
        assert_eq!(path(true, &points), "M0 98.0H200H300V2.0H400");
    }

    #[test]
    fn what_happened_is_escaped_and_what_is_elsewhere_is_left_out() {
        let moment = |at_ms| Moment {
            at_ms,
            words: "<script>\"&".into(),
            href: Some("?at=1&b=\"><script>".into()),
            is_open: false,
        };
        let moments = [moment(500), moment(5_000)];
        let timeline = Timeline { from_ms: 0, to_ms: 1000, top: 1.0, series: &[], target: None, moments: &moments };
        let svg = timeline.svg();
        assert_eq!((svg.matches("<title>").count(), svg.matches("<script>").count()), (1, 0), "{svg}");
    }

    #[test]
    fn moments_that_say_nothing_are_one_shape() {
        let moment = |at_ms| Moment { at_ms, words: String::new(), href: None, is_open: false };
        let moments = [moment(0), moment(500)];
        let timeline = Timeline { from_ms: 0, to_ms: 1000, top: 1.0, series: &[], target: None, moments: &moments };
        assert!(timeline.svg().contains("<path d=\"M0.0 0V100M500.0 0V100\"/>"), "{}", timeline.svg());
    }

    #[test]
    fn an_axis_ends_at_a_round_number() {
        assert_eq!([0.0, 1.0, 3.0, 47.0, 130.0, f64::NAN].map(round_top), [0.001, 1.0, 4.0, 50.0, 200.0, 0.001]);
    }
}
