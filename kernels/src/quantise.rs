//! Rows in e4m3 with a scale each: buffers of them, and the operations that write some. The formula is in `csrc/quantise.cuh`.
//! Checks buffers, launches; chooses nothing.

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};
use half::bf16;
pub use stoker_fit::gpu::CodeSums;
use stoker_fit::gpu::SUM_DIGITS;

use crate::{
    Device, KernelError, Kernels, check_len, check_room, codes,
    int4::{GroupSize, Int4View},
    launch::{self, Residual, Rows, refused},
    linear::{Blocks, Quantised, Written},
    reference::sum_digits,
    sys::Launch,
};

/// Depths that are multiplied in e4m3 are multiples of this.
pub(crate) const E4M3_WHOLE: usize = 16;
/// Values of a group that rows beside codes have a sum of each.
const WIDE_GROUP: usize = GroupSize::G128.values();
/// The largest number of e4m3.
pub const E4M3_MAX: f32 = 448.0;
/// The largest that rows beside codes are scaled to: 128 of these are no more than eight of the largest number.
pub const BESIDE_CODES_MAX: f32 = 28.0;

/// Device memory for rows in e4m3, or for weights with a scale a block.
#[derive(Debug)]
pub struct QuantisedRows {
    values: CudaSlice<u8>,
    scales: CudaSlice<f32>,
    /// Empty where no rows are beside codes.
    sums: CudaSlice<u8>,
    room: CodeSums,
}

/// What products of codes want of rows besides: in each 16 numbers of a row the two halves in turn (0 8 1 9 and so on), numbers up to
/// [`BESIDE_CODES_MAX`], and the sum of each 128 as [`sum_digits`] writes it, at [width / 128][stride][`SUM_DIGITS`].
#[derive(Debug)]
pub struct BesideCodes<View> {
    /// Digits of sums of numbers without their scales.
    pub sums: View,
    /// From one 128 of a row to its next.
    pub stride: usize,
}

/// Rows that are written.
#[derive(Debug)]
pub struct QuantisedMut<'a> {
    /// The numbers.
    pub values: CudaViewMut<'a, u8>,
    /// One a row.
    pub scales: CudaViewMut<'a, f32>,
    /// Where codes are what they are multiplied with.
    pub beside: Option<BesideCodes<CudaViewMut<'a, u8>>>,
}

/// `out = e4m3(x / scale)` by rows, `scale` the largest of the row by [`E4M3_MAX`], beside codes by [`BESIDE_CODES_MAX`].
#[derive(Debug)]
pub struct QuantiseRows<'a> {
    /// As many rows.
    pub out: QuantisedMut<'a>,
    /// Rows of `width`.
    pub x: CudaView<'a, bf16>,
    /// Values of a row, a multiple of 8.
    pub width: usize,
}

/// The same of `rms_norm(x) * weight`, or of the residual's norm after `x` was added to it: [`crate::pointwise::RmsNorm`] and
/// [`crate::pointwise::AddRmsNorm`] with a quantised result, to the bit.
#[derive(Debug)]
pub struct QuantisedNorm<'a> {
    /// As many rows.
    pub out: QuantisedMut<'a>,
    /// Rows of `weight.len()` that `x` is added to.
    pub residual: Option<CudaViewMut<'a, bf16>>,
    /// Rows of `weight.len()`.
    pub x: CudaView<'a, bf16>,
    /// One value a column.
    pub weight: CudaView<'a, bf16>,
    /// Added to the mean square.
    pub eps: f32,
}

/// Weights of four bits to e4m3 with a scale an output, by the formula of `csrc/widen_int4.cu`.
#[derive(Debug)]
pub struct WidenInt4<'a> {
    /// Outputs.
    pub out: QuantisedMut<'a>,
    /// As many; their depth is a multiple of 16.
    pub w: Int4View<'a>,
}

impl QuantisedRows {
    /// Zeros, of so many values in so many rows at the most.
    pub fn zeros(device: &Device, n_values: usize, n_rows: usize) -> Result<Self, KernelError> {
        Ok(Self {
            values: device.zeros(n_values)?,
            scales: device.zeros(n_rows)?,
            sums: device.zeros(0)?,
            room: CodeSums::default(),
        })
    }

    /// For rows that are all to be written, which no other GPU reads.
    pub fn unset(device: &Device, n_values: usize, n_rows: usize) -> Result<Self, KernelError> {
        Ok(Self {
            values: device.own_unset(n_values)?,
            scales: device.unset(n_rows)?,
            sums: device.zeros(0)?,
            room: CodeSums::default(),
        })
    }

    /// With this room for sums of rows that are beside codes.
    pub fn beside_codes(self, device: &Device, room: CodeSums) -> Result<Self, KernelError> {
        Ok(Self { sums: device.zeros(room.bytes())?, room, ..self })
    }

    /// With these numbers and scales.
    pub fn holding(device: &Device, values: &[u8], scales: &[f32]) -> Result<Self, KernelError> {
        Ok(Self {
            values: device.holding(values)?,
            scales: device.holding(scales)?,
            sums: device.zeros(0)?,
            room: CodeSums::default(),
        })
    }

    /// The same beside codes: numbers in the order of columns are brought into the one that [`BesideCodes`] says.
    pub fn holding_beside_codes(
        device: &Device,
        numbers: &[u8],
        scales: &[f32],
        width: usize,
    ) -> Result<Self, KernelError> {
        const ZIPPED: usize = 16;
        let zip = |pairs: &[u8]| (0..ZIPPED).map(|at| pairs[at / 2 + at % 2 * (ZIPPED / 2)]).collect::<Vec<_>>();
        let zipped: Vec<u8> = numbers.chunks(ZIPPED).flat_map(zip).collect();
        let room = CodeSums::of_rows(width, scales.len());
        let mut sums = vec![0; room.bytes()];
        for (row, numbers) in numbers.chunks(width).enumerate() {
            for (group, numbers) in numbers.chunks(WIDE_GROUP).enumerate() {
                let sum = numbers.iter().map(|code| codes::e4m3(*code)).sum();
                let place = (group * room.stride + row) * SUM_DIGITS;
                sums[place..place + SUM_DIGITS].copy_from_slice(&sum_digits(sum));
            }
        }
        let (values, scales, sums) = (device.holding(&zipped)?, device.holding(scales)?, device.holding(&sums)?);
        Ok(Self { values, scales, sums, room })
    }

    /// With these scales, for so many numbers that are to be brought there.
    pub fn with_scales(device: &Device, n_values: usize, scales: &[f32]) -> Result<Self, KernelError> {
        Ok(Self {
            values: device.own_unset(n_values)?,
            scales: device.holding(scales)?,
            sums: device.zeros(0)?,
            room: CodeSums::default(),
        })
    }

    /// The same numbers with these scales.
    pub fn scaled_by(self, device: &Device, scales: &[f32]) -> Result<Self, KernelError> {
        Ok(Self { scales: device.holding(scales)?, ..self })
    }

    /// The numbers' bytes two by two, for who moves bytes and knows bf16 only.
    pub fn pairs_mut(&mut self) -> CudaViewMut<'_, bf16> {
        let n_pairs = self.values.len() / 2;
        // SAFETY: as many bytes, allocated with the alignment of device memory; all bits are valid in both types.
        let pairs = unsafe { self.values.transmute_mut(n_pairs) };
        pairs.expect("pairs are no longer than what they are of")
    }

    /// The numbers' bytes.
    pub fn values(&self) -> &CudaSlice<u8> {
        &self.values
    }

    /// The scales.
    pub fn scales(&self) -> &CudaSlice<f32> {
        &self.scales
    }

    /// The sums of rows beside codes.
    pub fn sums(&self) -> &CudaSlice<u8> {
        &self.sums
    }

    /// The first rows, of this width, which the step has written.
    pub fn rows(&self, n_rows: usize, width: usize) -> Quantised<'_> {
        let (values, scales) = (self.values.slice(..n_rows * width), self.scales.slice(..n_rows));
        Quantised { values, scales, beside: None, written: Written::Lately }
    }

    /// The same as they are beside codes.
    pub fn rows_beside_codes(&self, n_rows: usize, width: usize) -> Quantised<'_> {
        let sums = self.sums.slice(..self.room.of_width(width).bytes());
        let beside = Some(BesideCodes { sums, stride: self.room.stride });
        Quantised { beside, ..self.rows(n_rows, width) }
    }

    /// All, which no step writes.
    pub fn all(&self) -> Quantised<'_> {
        let (values, scales) = (self.values.as_view(), self.scales.as_view());
        Quantised { values, scales, beside: None, written: Written::AtStart }
    }

    /// All, whose scales are those of blocks.
    pub fn blocks(&self) -> Blocks<'_> {
        Blocks { values: self.values.as_view(), scales: self.scales.as_view() }
    }

    /// The first rows, of this width, to be written.
    pub fn rows_mut(&mut self, n_rows: usize, width: usize) -> QuantisedMut<'_> {
        let (values, scales) = (self.values.slice_mut(..n_rows * width), self.scales.slice_mut(..n_rows));
        QuantisedMut { values, scales, beside: None }
    }

    /// The same as they are beside codes.
    pub fn rows_beside_codes_mut(&mut self, n_rows: usize, width: usize) -> QuantisedMut<'_> {
        let sums = self.sums.slice_mut(..self.room.of_width(width).bytes());
        let (values, scales) = (self.values.slice_mut(..n_rows * width), self.scales.slice_mut(..n_rows));
        QuantisedMut { values, scales, beside: Some(BesideCodes { sums, stride: self.room.stride }) }
    }
}

impl Kernels {
    /// Quantises rows.
    pub fn quantise_rows(&self, op: QuantiseRows<'_>) -> Result<(), KernelError> {
        const OP: &str = "quantise_rows";
        let QuantiseRows { mut out, x, width } = op;
        let rows = check_rows(OP, &out, x.len(), width)?;
        let launch = self.functions.launch(OP, launch::quantise_rows(rows)?);
        out.pass(launch).read(&x).int(width / 8).start()
    }

    /// Norms and quantises rows.
    pub fn quantised_norm(&self, op: QuantisedNorm<'_>) -> Result<(), KernelError> {
        const OP: &str = "rms_norm";
        let QuantisedNorm { mut out, residual, x, weight, eps } = op;
        let rows = check_rows(OP, &out, x.len(), weight.len())?;
        let adds = if residual.is_some() { Residual::Added } else { Residual::None };
        let launch = self.functions.launch(OP, launch::rms_norm_e4m3(rows, adds)?);
        let launch = out.pass(launch);
        let launch = match residual {
            Some(mut residual) => {
                check_len(OP, "residual", residual.len(), x.len())?;
                launch.write(&mut residual)
            }
            None => launch,
        };
        launch.read(&x).read(&weight).int(rows.width / 8).float(eps).start()
    }

    /// Widens weights.
    pub fn widen_int4(&self, op: WidenInt4<'_>) -> Result<(), KernelError> {
        const OP: &str = "widen_int4";
        let WidenInt4 { mut out, w: Int4View { layout, codes, groups } } = op;
        let (config, n_chunks) = launch::widen_int4(layout)?;
        check_len(OP, "out", out.values.len(), layout.n * layout.k)?;
        check_room(OP, "scales", out.scales.len(), layout.n)?;
        check_len(OP, "codes", codes.len(), layout.n_code_words())?;
        check_len(OP, "groups", groups.len(), layout.n_group_words())?;
        let launch = self.functions.launch(OP, config).write(&mut out.values).write(&mut out.scales);
        layout.pass(launch.read(&codes).read(&groups)).int(layout.n).int(layout.k).int(n_chunks).start()
    }
}

impl QuantisedMut<'_> {
    fn pass<'a>(&'a mut self, launch: Launch<'a>) -> Launch<'a> {
        let launch = launch.write(&mut self.values).write(&mut self.scales);
        let stride = self.beside.as_ref().map_or(0, |beside| beside.stride);
        launch.write_optional(self.beside.as_mut().map(|beside| &mut beside.sums)).int(stride)
    }

    /// Sums have room, and rows are whole groups.
    fn check_beside(&self, op: &'static str, Rows { n_rows, width }: Rows) -> Result<(), KernelError> {
        let Some(BesideCodes { sums, stride }) = &self.beside else { return Ok(()) };
        if !width.is_multiple_of(WIDE_GROUP) || n_rows > *stride {
            return Err(refused(
                op,
                format!("{n_rows} rows of {width} are not {stride} of whole groups of {WIDE_GROUP}"),
            ));
        }
        check_room(op, "sums", sums.len(), width / WIDE_GROUP * stride * SUM_DIGITS)
    }
}

/// As many rows on both sides.
fn check_rows(op: &'static str, out: &QuantisedMut<'_>, n_values: usize, width: usize) -> Result<Rows, KernelError> {
    if width == 0 || !n_values.is_multiple_of(width) {
        return Err(refused(op, format!("{n_values} values are no rows of {width}")));
    }
    let n_rows = n_values / width;
    check_len(op, "out", out.values.len(), n_values)?;
    check_room(op, "scales", out.scales.len(), n_rows)?;
    let rows = Rows { n_rows, width };
    out.check_beside(op, rows)?;
    Ok(rows)
}
