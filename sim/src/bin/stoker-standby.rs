//! Prints what nodes that stand by are worth: the table of docs/autoscaling.md.

use stoker_sim::warm::{rows, table};

fn main() {
    print!("{}", table(&rows()));
}
