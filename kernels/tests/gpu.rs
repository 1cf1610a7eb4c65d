//! Every kernel against its reference on this machine's GPU, if it has one.

#[path = "../../tests/src/skip.rs"]
#[expect(unreachable_pub, reason = "one file for these tests and for the harness of the whole-system tests")]
mod skip;

use skip::skip;
use stoker_kernels::{Device, checks};

#[test]
fn kernels_agree_with_their_references() {
    let device = match Device::open(0) {
        Ok(device) => device,
        Err(reason) => return skip("kernels_agree_with_their_references", &reason.to_string()),
    };
    if !stoker_kernels::built_with_kernels() {
        return skip("kernels_agree_with_their_references", "built without GPU kernels");
    }
    let outcomes = checks::run(&device, "").unwrap();
    let wrong: Vec<_> = outcomes.iter().filter(|outcome| !outcome.passes()).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
