//! What nodes that stand by are worth: that the page says what comes out.

use std::fs;

use stoker_sim::warm::{REPLICAS_MAX, Row, rows, table};

#[test]
fn the_page_has_the_table_that_comes_out_of_one_replica_becoming_eight() {
    let rows = rows();
    for Row { trace, outcomes, .. } in &rows {
        // Without a node that stands by.
        for run in &outcomes[0] {
            let most = run.samples.iter().map(|sample| sample.desired).max();
            assert_eq!((run.samples[0].serving, most), (1, Some(REPLICAS_MAX)), "{trace}");
        }
    }
    let page =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/autoscaling.md")).expect("read the page");
    let table = table(&rows);
    assert!(
        page.contains(&table),
        "docs/autoscaling.md: put in what `cargo run -p stoker-sim --bin stoker-standby` prints\n{table}"
    );
}
