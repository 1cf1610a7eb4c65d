//! Comparisons of weights that arrive on the device in every format.

use super::{Gpu, Outcome, fixture::widened, relative_error};
use crate::{
    KernelError, bf16,
    format::WeightFormat,
    upload::{Stored, Upload, upload},
};

/// Where blocks have scales in f16.
fn scales(format: WeightFormat) -> &'static [usize] {
    match format {
        WeightFormat::F32 | WeightFormat::Bf16 => &[],
        WeightFormat::F16 | WeightFormat::Q8_0 | WeightFormat::Q4_0 | WeightFormat::Q5_0 => &[0],
        WeightFormat::Q4_1 | WeightFormat::Q5_1 | WeightFormat::Q4K | WeightFormat::Q5K => &[0, 2],
        WeightFormat::Q6K => &[208],
    }
}

/// Random blocks whose scales are finite.
fn random_blocks(gpu: &mut Gpu, format: WeightFormat, n_blocks: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..n_blocks * format.block_bytes()).map(|_| gpu.noise.below(256) as u8).collect();
    for block in bytes.chunks_mut(format.block_bytes()) {
        // Exponents far below those of infinity and NaN, in f16 and in f32.
        scales(format).iter().for_each(|at| block[at + 1] &= 0xbf);
        if matches!(format, WeightFormat::F32 | WeightFormat::Bf16) {
            let last = block.len() - 1;
            block[last] &= 0xbf;
        }
    }
    bytes
}

/// Every format alone, its parts shared out over pieces and threads, and all of them in one tensor. Not a bit differs.
pub(super) fn run(gpu: &mut Gpu) -> Result<Vec<Outcome>, KernelError> {
    let mut outcomes = Vec::new();
    let mut mixed = Vec::new();
    for format in WeightFormat::ALL {
        let small = random_blocks(gpu, format, 9);
        // Some pieces of 4 MiB, and the beginning of one more.
        let large = random_blocks(gpu, format, (9 << 20) / format.block_bytes());
        outcomes.push(compare(gpu, format.name(), &[(format, large), (format, small.clone())])?);
        mixed.push((format, small));
    }
    outcomes.push(compare(gpu, "all formats", &mixed)?);
    Ok(outcomes)
}

fn compare(gpu: &Gpu, case: &str, parts: &[(WeightFormat, Vec<u8>)]) -> Result<Outcome, KernelError> {
    let unpacked = parts.iter().flat_map(|(format, bytes)| format.unpack(bytes));
    let wanted: Vec<f32> = unpacked.map(|value| bf16::from_f32(value).to_f32()).collect();
    let mut target = gpu.upload(&vec![bf16::NAN; wanted.len()])?;
    let parts = parts.iter().map(|(format, bytes)| Stored { format: *format, bytes }).collect();
    upload(&gpu.kernels, vec![Upload { target: target.as_view_mut(), parts }], &|_| {})?;
    let error = relative_error(&widened(&gpu.download(&target)?), &wanted);
    Ok(Outcome { op: "unpack_blocks", case: format!("{case}, {} values", wanted.len()), error, limit: 0.0 })
}
