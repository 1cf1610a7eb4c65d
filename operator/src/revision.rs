//! The revision: a hash of everything a replica's pod depends on. Pure.
//!
//! It hashes what the user and the operator's defaults decide, not the rendered pod, so that an operator upgrade rolls
//! pods only when `TEMPLATE_EPOCH` says that the rendering changed in a way replicas must have.

use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::validate::ReplicaInputs;

/// Raised when a new rendering of pods must reach replicas that run already.
const TEMPLATE_EPOCH: u32 = 2;

/// Hexadecimal digits of a revision.
const REVISION_DIGITS: usize = 8;

#[derive(Serialize)]
struct Hashed<'a> {
    epoch: u32,
    inputs: &'a ReplicaInputs,
}

/// The revision of pods made from `inputs`.
pub fn revision(inputs: &ReplicaInputs) -> String {
    let text = serde_json::to_vec(&Hashed { epoch: TEMPLATE_EPOCH, inputs }).expect("replica inputs are JSON");
    let digest = Sha256::digest(text);
    digest.iter().flat_map(|byte| [byte >> 4, byte & 15]).take(REVISION_DIGITS).map(hex_digit).collect()
}

fn hex_digit(nibble: u8) -> char {
    char::from_digit(nibble.into(), 16).expect("a nibble is below 16")
}
