//! Prints how changes of whole fleets go: the table of docs/rollouts.md.

use stoker_explore::rollouts::{outcomes, table};

fn main() {
    print!("{}", table(&outcomes()));
}
