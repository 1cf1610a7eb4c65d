//! Damaged headers are refused or hold what they say; here, where allocations are watched.

use serde_json::Value;
use stoker_fit::gguf::{Extent, Header};

use crate::model::damage;

const MAGIC: &[u8] = b"GGUF";
const ALIGNMENT: usize = 32;

/// A file with a key of every kind, an array and two tensors.
fn good() -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let mut file = [MAGIC, &3u32.to_le_bytes(), &2u64.to_le_bytes(), &13u64.to_le_bytes()].concat();
    let scalars = [(0u32, 1), (1, 1), (2, 2), (3, 2), (4, 4), (5, 4), (6, 4), (7, 1), (10, 8), (11, 8), (12, 8)];
    for (kind, n_bytes) in scalars {
        file.extend([text(&format!("key.{kind}")), kind.to_le_bytes().to_vec(), vec![1; n_bytes]].concat());
    }
    file.extend([text("key.text"), 8u32.to_le_bytes().to_vec(), text("llama")].concat());
    let array = [9u32.to_le_bytes(), 8u32.to_le_bytes()].concat();
    file.extend([text("key.array"), array, 2u64.to_le_bytes().to_vec(), text("a"), text("bc")].concat());
    for (name, kind, offset) in [("plain", 0u32, 0u64), ("blocks", 8, 256)] {
        let shape = [2u32.to_le_bytes().to_vec(), 32u64.to_le_bytes().to_vec(), 2u64.to_le_bytes().to_vec()].concat();
        file.extend([text(name), shape, kind.to_le_bytes().to_vec(), offset.to_le_bytes().to_vec()].concat());
    }
    file.resize(file.len().next_multiple_of(ALIGNMENT) + 256 + 2 * 34, 7);
    file
}

#[test]
fn damaged_files_are_refused_or_hold_what_they_say() {
    let whole = Header::read(&good(), Extent::Whole).unwrap();
    assert_eq!((whole.metadata.len(), whole.tensors.len()), (13, 2));
    damage::read_all(&good(), |case, file| {
        let _ = Header::read(&file, Extent::Beginning);
        if let Ok(header) = Header::read(&file, Extent::Whole) {
            let values: usize = header.metadata.values().filter_map(Value::as_array).map(Vec::len).sum();
            assert!(values <= file.len(), "case {case}: no more values than bytes");
            assert!(header.tensors.values().all(|tensor| tensor.range.end <= file.len()), "case {case}");
        }
    });
}
