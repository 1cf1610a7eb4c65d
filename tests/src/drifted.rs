//! Copies of ember whose weights were changed by a little: what a broken conversion or a wrong upload leaves.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Writes ember to a directory, every weight of its matrices multiplied by 1 and up to `noise` more or less, the same each time.
pub fn ember_with_noise(noise: f32, directory: &Path) -> Result<()> {
    let ember = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/ember");
    fs::create_dir_all(directory)?;
    for entry in fs::read_dir(&ember)? {
        let path = entry?.path();
        if path.is_file() {
            fs::copy(&path, directory.join(path.file_name().context("a file has a name")?))?;
        }
    }
    let weights = directory.join("model.safetensors");
    let mut bytes = fs::read(&weights)?;
    disturb(&mut bytes, noise)?;
    Ok(fs::write(&weights, bytes)?)
}

/// A safetensors file: eight bytes with the length of a JSON header, that, and the tensors behind it.
fn disturb(bytes: &mut [u8], noise: f32) -> Result<()> {
    let (length, rest) = bytes.split_first_chunk_mut().context("a file of more than eight bytes")?;
    let (header, data) = rest.split_at_mut(usize::try_from(u64::from_le_bytes(*length))?);
    let header: Value = serde_json::from_slice(header)?;
    let mut random = 1_u32;
    for (name, tensor) in header.as_object().context("an object of tensors")? {
        if tensor["shape"].as_array().map(Vec::len) != Some(2) {
            continue;
        }
        ensure!(tensor["dtype"] == "BF16", "{name}: {}", tensor["dtype"]);
        let offset = |place: usize| usize::try_from(tensor["data_offsets"][place].as_u64().unwrap_or_default());
        for weight in data[offset(0)?..offset(1)?].chunks_exact_mut(2) {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Of the upper bits, in -1 to 1.
            let drawn = (random >> 8) as f32 / (1 << 23) as f32 - 1.0;
            let value = f32::from_bits(u32::from(u16::from_le_bytes([weight[0], weight[1]])) << 16);
            let rounded = ((value * (1.0 + noise * drawn)).to_bits() + 0x8000) >> 16;
            weight.copy_from_slice(&(rounded as u16).to_le_bytes());
        }
    }
    Ok(())
}
