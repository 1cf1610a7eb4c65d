//! Figures as a page for a browser, in the look of all pages: what docs/benchmarks says in tables. Pure.

use stoker_figures::{BESIDE, COLUMNS, Figure, beside_peers, cells, newest};
use stoker_pages::report::{Report, Section};

const ABOUT: &str = "Written by stoker-bench report. A ratio is formed inside one run on one machine, for the same work; above 1 is where Stoker \
                     is better, whichever way the metric counts: of the medians, or paired, the median of the ratios of samples that \
                     were taken in turn. Of each figure its newest run is shown.";

/// The page of these figures, by topic.
pub fn report(topics: Vec<(String, Vec<Figure>)>) -> String {
    let sections = topics.into_iter().flat_map(|(topic, figures)| [beside(&topic, &figures), all(&topic, figures)]);
    let sections = sections.filter(|section| !section.rows.is_empty()).collect();
    Report { title: "Benchmarks".to_owned(), about: ABOUT.to_owned(), sections }.render()
}

fn beside(topic: &str, figures: &[Figure]) -> Section {
    let rows = beside_peers(figures);
    Section {
        title: format!("{topic}, beside peers"),
        columns: BESIDE.map(str::to_owned).to_vec(),
        ratios: rows.iter().map(|row| row.ratio).collect(),
        rows: rows.into_iter().map(|row| row.cells.to_vec()).collect(),
        ..Section::default()
    }
}

fn all(topic: &str, figures: Vec<Figure>) -> Section {
    Section {
        title: format!("{topic}, all figures"),
        columns: COLUMNS.map(str::to_owned).to_vec(),
        rows: newest(figures).iter().map(|figure| cells(figure).to_vec()).collect(),
        ..Section::default()
    }
}

#[cfg(test)]
mod tests {
    use stoker_figures::{Conditions, Key, Run, System};

    use super::*;

    fn figure(system: &str, value: f64) -> Figure {
        let conditions = Conditions { commit: "c".into(), machine: "m".into(), command: "make bench".into() };
        let system = System { name: system.into(), version: "1".into() };
        let key = Key { model: "ember", dtype: "bf16", case: "concurrent_8", metric: "itl_ms" };
        Run::named("a".into(), conditions).figure_of(&system, key, &[value])
    }

    #[test]
    fn each_topic_has_its_peers_and_its_figures_and_nothing_empty() {
        let page = report(vec![
            ("gpu".to_owned(), vec![figure("stoker", 5.0), figure("vllm", 6.0)]),
            ("alone".to_owned(), vec![figure("stoker", 5.0)]),
            ("nothing".to_owned(), Vec::new()),
        ]);
        let headings: Vec<_> = page.split("<h2>").skip(1).filter_map(|part| part.split("</h2>").next()).collect();
        assert_eq!(headings, ["gpu, beside peers", "gpu, all figures", "alone, all figures"]);
        assert!(
            page.contains("vllm 1: 6") && page.contains(">1.2<") && page.matches("class=\"ratio\"").count() == 1,
            "{page}"
        );
    }
}
