//! Figures as a person reads them in a terminal.

use std::fmt::Write as _;

use stoker_figures::Figure;

/// One line a figure, columns aligned.
pub fn table(figures: &[Figure]) -> String {
    let mut text =
        format!("{:<16} {:<22} {:<24} {:>10}   {}\n", "case", "metric", "system", "median", "min to max (n)");
    for figure in figures {
        let system = format!("{} {}", figure.system, figure.version);
        let _ = writeln!(
            text,
            "{:<16} {:<22} {:<24} {:>10.3}   {:.3} to {:.3} ({})",
            figure.case, figure.metric, system, figure.value, figure.min, figure.max, figure.n
        );
    }
    text
}
