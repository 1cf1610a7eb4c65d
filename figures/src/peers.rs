//! Stoker beside its peers: rows for tables, and pictures. A ratio is formed only inside a run. Reads no file.

use crate::{
    figure::Figure,
    plot::{self, Bar, Line, Point, Titles},
    render::{Page, short},
    stats::better,
};

const OURS: &str = "stoker";
const RATIO: &str = "ratio_to_";
const CONCURRENT: &str = "concurrent_";
/// Fewer make no curve.
const CURVE_POINTS: usize = 3;

/// What [`Beside::cells`] say, in their order.
pub const BESIDE: [&str; 9] = ["case", "metric", "model", "dtype", "stoker", "peer", "ratio", "machine", "run"];

/// The same work by Stoker and a peer in one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Beside {
    /// One for each of [`BESIDE`].
    pub cells: [String; 9],
    /// How many times better Stoker is, whichever way the metric counts.
    pub ratio: f64,
}

/// Rows of the newest run in which a case was measured beside a peer: of the medians, then the paired ratios.
pub fn beside_peers(figures: &[Figure]) -> Vec<Beside> {
    newest_pairs(figures).iter().map(Pair::row).chain(newest_ratios(figures).map(paired_row)).collect()
}

/// The table of [`beside_peers`] below the pictures; empty without a peer.
pub(crate) fn section(figures: &[Figure], pictures: &[Page]) -> String {
    let rows = beside_peers(figures);
    if rows.is_empty() {
        return String::new();
    }
    let pictures: String = pictures.iter().map(|(name, _)| format!("![{name}]({name})\n\n")).collect();
    let cell = |cell: &String| if cell.is_empty() { "| ".to_owned() } else { format!("| {cell} ") };
    let rows: String = rows.iter().map(|row| row.cells.iter().map(cell).collect::<String>() + "|\n").collect();
    format!(
        "## Beside peers\n\nOne run, one machine, the same work. A ratio above 1 is where Stoker is better, whichever way the \
         metric counts: of the medians, or paired, the median of the ratios of samples that were taken in turn.\n\n{pictures}\
         | {} |\n|---|---|---|---|---:|---|---|---|---|\n{rows}\n## All figures\n\n",
        BESIDE.join(" | ")
    )
}

/// The same work by two systems in one run.
struct Pair<'a> {
    ours: &'a Figure,
    theirs: &'a Figure,
}

impl Pair<'_> {
    fn row(&self) -> Beside {
        let Self { ours, theirs } = *self;
        let ratio = better(&ours.metric).ratio(ours.value, theirs.value);
        let peer = format!("{} {}: {}", theirs.system, theirs.version, short(theirs.value));
        let middle = [short(ours.value), peer, short(ratio)];
        Beside { cells: cells(ours, ours.metric.clone(), middle), ratio }
    }
}

fn paired_row(figure: &Figure) -> Beside {
    let Figure { value, min, max, n, .. } = *figure;
    let peer = figure.metric.trim_start_matches(RATIO).to_owned();
    let ratio = format!("{} ({} to {}, {n})", short(value), short(min), short(max));
    Beside { cells: cells(figure, "paired".to_owned(), [String::new(), peer, ratio]), ratio: value }
}

fn cells(of: &Figure, metric: String, [ours, peer, ratio]: [String; 3]) -> [String; 9] {
    let Figure { case, model, dtype, machine, run, .. } = of.clone();
    [case, metric, model, dtype, ours, peer, ratio, machine, run]
}

/// Later runs stand later in a file: the last pair of each case, metric and peer is the newest.
fn newest_pairs(figures: &[Figure]) -> Vec<Pair<'_>> {
    let mut pairs: Vec<Pair<'_>> = Vec::new();
    for theirs in figures.iter().filter(|figure| figure.system != OURS) {
        let is_ours = |figure: &&Figure| figure.system == OURS && figure.run == theirs.run && same_row(figure, theirs);
        let Some(ours) = figures.iter().rfind(is_ours) else { continue };
        pairs.retain(|pair| pair.theirs.system != theirs.system || !same_row(pair.theirs, theirs));
        pairs.push(Pair { ours, theirs });
    }
    pairs
}

fn same_row(a: &Figure, b: &Figure) -> bool {
    (&a.case, &a.metric, &a.model, &a.dtype, a.gpu()) == (&b.case, &b.metric, &b.model, &b.dtype, b.gpu())
}

fn newest_ratios(figures: &[Figure]) -> impl Iterator<Item = &Figure> {
    let is_newest = |idx: usize| !figures[idx + 1..].iter().any(|later| same_row(later, &figures[idx]));
    let ratios = figures.iter().enumerate().filter(|(_, figure)| figure.metric.starts_with(RATIO));
    ratios.filter(move |(idx, _)| is_newest(*idx)).map(|(_, ratio)| ratio)
}

/// Pictures of what [`section`] says in numbers: the paired ratios, and tokens a second against the wait between them.
pub(crate) fn pictures(topic: &str, figures: &[Figure]) -> Vec<Page> {
    let mut ratios: Vec<&Figure> = newest_ratios(figures).collect();
    ratios.sort_by_key(|ratio| (ratio.gpu(), &ratio.model, &ratio.metric));
    let ratios: Vec<Bar> = ratios.into_iter().map(bar).collect();
    let bars =
        (!ratios.is_empty()).then(|| plot::bars("how many times better than the peer, in the same run", &ratios));
    let curve = curve(figures).map(|(what, lines)| {
        let picture = format!("sequences at once: what all get, and what each waits; {what}");
        let (x, y) = ("ms between tokens of one sequence", "tokens a second of all");
        plot::curve(Titles { picture: &picture, x, y }, &lines)
    });
    let named = [(format!("{topic}-ratios.svg"), bars), (format!("{topic}-concurrent.svg"), curve)];
    named.into_iter().filter_map(|(name, picture)| Some((name, picture?))).collect()
}

fn bar(ratio: &Figure) -> Bar {
    Bar {
        label: format!("{} {}", ratio.case, what(ratio)),
        series: ratio.metric.trim_start_matches(RATIO).to_owned(),
        value: ratio.value,
        min: ratio.min,
        max: ratio.max,
    }
}

/// Of the newest run with enough numbers of sequences beside a peer: what it ran, and a line for each system.
fn curve(figures: &[Figure]) -> Option<(String, [Line; 2])> {
    let pairs = newest_pairs(figures);
    let points = pairs.iter().filter(|pair| pair.ours.metric == "itl_ms" && pair.ours.case.starts_with(CONCURRENT));
    let points: Vec<&Pair<'_>> = points.collect();
    let mut of_a_run = points.iter().rev().map(|newest| {
        let points: Vec<_> = points.iter().filter(|pair| same_curve(pair, newest)).copied().collect();
        (what(newest.ours), curve_of(figures, &points))
    });
    of_a_run.find(|(_, lines)| has_enough_points(lines))
}

fn what(figure: &Figure) -> String {
    [&*figure.model, &*figure.dtype, figure.gpu()].join(" ").trim_end().to_owned()
}

fn same_curve(a: &Pair<'_>, b: &Pair<'_>) -> bool {
    (&a.ours.run, &a.ours.model, &a.ours.dtype, &a.theirs.system)
        == (&b.ours.run, &b.ours.model, &b.ours.dtype, &b.theirs.system)
}

fn curve_of(figures: &[Figure], pairs: &[&Pair<'_>]) -> [Line; 2] {
    let (ours, theirs) = pairs.iter().map(|pair| (point(figures, pair.ours), point(figures, pair.theirs))).unzip();
    [line(pairs[0].ours.system.clone(), ours), line(pairs[0].theirs.system.clone(), theirs)]
}

fn has_enough_points(lines: &[Line]) -> bool {
    lines.iter().all(|line| line.points.len() >= CURVE_POINTS)
}

fn line(series: String, points: Vec<Option<Point>>) -> Line {
    let mut points: Vec<Point> = points.into_iter().flatten().collect();
    points.sort_by(|a, b| a.x.total_cmp(&b.x));
    Line { series, points }
}

/// The wait between tokens with the rate of the same system, run and case.
fn point(figures: &[Figure], wait: &Figure) -> Option<Point> {
    let is_rate = |figure: &&Figure| {
        figure.metric == "tok_s"
            && (&figure.run, &figure.system, &figure.case) == (&wait.run, &wait.system, &wait.case)
            && (&figure.model, &figure.dtype) == (&wait.model, &wait.dtype)
    };
    let rate = figures.iter().rfind(is_rate)?;
    Some(Point { x: wait.value, y: rate.value, label: wait.case.trim_start_matches(CONCURRENT).to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figure::{Conditions, Key, Run, System};

    fn figure(run: &str, system: &str, metric: &str, value: f64) -> Figure {
        let conditions = Conditions { commit: "c".into(), machine: "m".into(), command: "make bench".into() };
        let system = System { name: system.into(), version: "1".into() };
        let key = Key { model: "ember", dtype: "bf16", case: "concurrent_8", metric };
        Run::named(run.into(), conditions).figure_of(&system, key, &[value])
    }

    #[test]
    fn a_ratio_is_formed_inside_the_newest_run_that_has_both() {
        let figures = [
            figure("a", "stoker", "itl_ms", 6.0),
            figure("a", "vllm", "itl_ms", 6.0),
            figure("b", "stoker", "itl_ms", 5.0),
            figure("b", "vllm", "itl_ms", 6.0),
            figure("c", "stoker", "itl_ms", 1.0),
        ];
        let section = section(&figures, &[]);
        let row = "| concurrent_8 | itl_ms | ember | bf16 | 5 | vllm 1: 6 | 1.2 | m | b |";
        let rows: Vec<_> = section.lines().filter(|line| line.starts_with("| concurrent_8")).collect();
        assert_eq!(rows, [row]);
    }

    #[test]
    fn ratios_of_two_gpus_stand_beside_each_other() {
        let on =
            |machine: &str, value| Figure { machine: machine.into(), ..figure("a", "stoker", "ratio_to_vllm", value) };
        let figures =
            [on("1x H200, driver 1", 1.2), on("1x H100 80GB HBM3, driver 1", 1.3), on("1x H200, driver 2", 1.25)];
        let ratios: Vec<f64> = beside_peers(&figures).iter().map(|row| row.ratio).collect();
        assert_eq!(ratios, [1.3, 1.25], "the newest of each");
    }

    #[test]
    fn a_paired_ratio_is_shown_with_its_range() {
        let section = section(&[figure("a", "stoker", "ratio_to_llama.cpp", 1.25)], &[]);
        assert!(
            section.contains("| concurrent_8 | paired | ember | bf16 | | llama.cpp | 1.25 (1.25 to 1.25, 1) | m | a |")
        );
    }

    #[test]
    fn without_a_peer_there_is_no_section() {
        assert_eq!(section(&[figure("a", "stoker", "itl_ms", 6.0)], &[]), "");
        assert_eq!(section(&[figure("a", "stoker", "itl_ms", 6.0), figure("b", "vllm", "itl_ms", 6.0)], &[]), "");
        assert_eq!(pictures("gpu", &[figure("a", "stoker", "itl_ms", 6.0)]), []);
    }

    #[test]
    fn a_curve_is_drawn_of_one_run_from_three_numbers_of_sequences_on() {
        let sequences = |run: &str, n: u32| {
            let of = |system, metric, value| Figure {
                case: format!("concurrent_{n}"),
                ..figure(run, system, metric, value)
            };
            let n = f64::from(n);
            [
                of("stoker", "itl_ms", n),
                of("vllm", "itl_ms", 2.0 * n),
                of("stoker", "tok_s", 100.0),
                of("vllm", "tok_s", 50.0),
            ]
        };
        let mut figures: Vec<Figure> = [sequences("a", 64), sequences("b", 32), sequences("b", 8)].concat();
        assert_eq!(curve(&figures), None);
        figures.extend(sequences("b", 128));
        let (what, lines) = curve(&figures).unwrap();
        assert_eq!(what, "ember bf16");
        let waits = |line: &Line| line.points.iter().map(|point| point.x).collect::<Vec<_>>();
        assert_eq!([&lines[0].series, &lines[1].series], ["stoker", "vllm"]);
        assert_eq!([waits(&lines[0]), waits(&lines[1])], [[8.0, 32.0, 128.0], [16.0, 64.0, 256.0]]);
        assert_eq!(lines[1].points[0], Point { x: 16.0, y: 50.0, label: "8".into() });
        // A later run with fewer numbers, beside another peer, hides nothing.
        let later = sequences("c", 256).map(|figure| match figure.system.as_str() {
            "vllm" => Figure { system: "other".into(), ..figure },
            _ => figure,
        });
        figures.extend(later);
        assert_eq!(waits(&curve(&figures).unwrap().1[0]), [8.0, 32.0, 128.0]);
    }
}
