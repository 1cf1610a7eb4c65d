//! `lend-control-plane`: a control plane that tests of the suite use one after another.
//!
//! Writes its lease when it is ready. At each line that it reads it forgets what the last borrower left, who must be gone, and writes the lease
//! again. Ends with its input.

use std::io::stdin;

use anyhow::Result;
use stoker_cluster::ControlPlane;
use stoker_tests::cluster::lendable;

fn main() -> Result<()> {
    let mut control_plane = ControlPlane::start(lendable())?;
    let mut baseline = control_plane.baseline()?;
    println!("{}", control_plane.lease());
    for line in stdin().lines() {
        line?;
        control_plane.restore(&mut baseline)?;
        println!("{}", control_plane.lease());
    }
    Ok(())
}
