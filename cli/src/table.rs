//! Columns for people.

/// A line of heads, then rows. The first `n_words` columns hold words, the others numbers, which end below each other.
pub(crate) fn table<const N: usize>(head: [&str; N], n_words: usize, rows: &[[String; N]]) -> String {
    let length = |text: &str| text.chars().count();
    let width =
        |column: usize| rows.iter().map(|row| length(&row[column])).chain([length(head[column])]).max().unwrap_or(0);
    let line = |cells: [&str; N]| {
        let cells: Vec<String> = cells
            .iter()
            .enumerate()
            .map(|(column, cell)| match column < n_words {
                true => format!("{cell:<0$}", width(column)),
                false => format!("{cell:>0$}", width(column)),
            })
            .collect();
        cells.join("  ").trim_end().to_owned() + "\n"
    };
    let mut text = line(head);
    for row in rows {
        text += &line(row.each_ref().map(String::as_str));
    }
    text
}
