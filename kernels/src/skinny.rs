//! The products of a step of few rows by our own kernels, with the norms and additions of the residual stream inside: what adds
//! to it leaves what the next norm needs, and what reads the norm scales its result. The formulas are in `csrc/skinny.cuh`.
//! Chooses nothing.

use half::bf16;

use crate::{
    KernelError, Kernels, check_len,
    choose::ScaledBy,
    int4::Int4View,
    launch::{self, GemmShape, LaunchConfig, NORM_TILE, SkinnyForm, SkinnyKernel, norm_tiles},
    linear::{self, Blocks, Linear, Operand, Output, Quantised, RowScale, Update},
    sys::Launch,
};

const OP: &str = "skinny_gemm";

impl Kernels {
    /// Multiplies up to [`launch::SKINNY_ROWS_MAX`] rows by a kernel that the chip must have.
    pub fn skinny_gemm_by(&self, op: Linear<'_>, kernel: SkinnyKernel) -> Result<(), KernelError> {
        let form = match &op.y {
            Output::Bf16(_) => SkinnyForm::Bf16,
            Output::F32(_) => SkinnyForm::F32,
            Output::Gated(_) => SkinnyForm::Gated,
            Output::Sum(_) => return Err(launch::refused(OP, "it does not add to y".to_owned())),
        };
        self.skinny(op, form, None, kernel)
    }

    /// The same with a norm's factor: x is what an [`Update`] left weighted.
    pub fn skinny_scaled_by(
        &self,
        op: Linear<'_>,
        scale: RowScale<'_>,
        kernel: SkinnyKernel,
    ) -> Result<(), KernelError> {
        let form = match &op.y {
            Output::Bf16(_) => SkinnyForm::ScaledBf16,
            Output::F32(_) => SkinnyForm::ScaledF32,
            Output::Gated(_) => SkinnyForm::Gated,
            Output::Sum(_) => return Err(launch::refused(OP, "what is scaled is not added to y".to_owned())),
        };
        linear::check_squares(OP, &scale, op.shape)?;
        self.skinny(op, form, Some(scale), kernel)
    }

    /// Adds up to [`launch::SKINNY_ROWS_MAX`] rows of a product to the residual stream.
    pub fn skinny_update_by(&self, op: Update<'_>, kernel: SkinnyKernel) -> Result<(), KernelError> {
        let Update { mut residual, mut weighted, mut squares, norm, x, w, shape } = op;
        let GemmShape { m, n, k } = shape;
        let config = self.skinny_config(shape, SkinnyForm::Update, kernel, &w)?;
        check_len(OP, "x", x.len(), m * k)?;
        w.check(OP, "w", [n, k])?;
        check_len(OP, "residual", residual.len(), m * n)?;
        check_len(OP, "weighted", weighted.len(), m * n)?;
        check_len(OP, "squares", squares.len(), m * norm_tiles(n))?;
        check_len(OP, "the norm's weight", norm.len(), n)?;
        let launch = read_weights(self.functions.launch(OP, config).write(&mut residual), &w);
        let launch = launch.read(&x).write(&mut weighted);
        let launch = launch.read(&norm).write(&mut squares).float(0.0).int(m).int(n).int(k).int(NORM_TILE);
        format_of(launch, &w).start()
    }

    fn skinny(
        &self,
        op: Linear<'_>,
        form: SkinnyForm,
        scale: Option<RowScale<'_>>,
        kernel: SkinnyKernel,
    ) -> Result<(), KernelError> {
        let GemmShape { m, n, k } = op.shape;
        let config = self.skinny_config(op.shape, form, kernel, &op.w)?;
        linear::check(OP, &op)?;
        let Operand::Bf16(x) = &op.x else {
            return Err(launch::refused(OP, "it multiplies rows of bf16".to_owned()));
        };
        let launch = self.functions.launch(OP, config);
        let launch = match op.y {
            Output::Bf16(mut y) | Output::Sum(mut y) | Output::Gated(mut y) => launch.write(&mut y),
            Output::F32(mut y) => launch.write(&mut y),
        };
        // What only updates use.
        let launch = read_weights(launch, &op.w).read(x).read_optional::<bf16>(None).read_optional::<bf16>(None);
        let launch = launch.read_optional(scale.as_ref().map(|scale| &scale.squares));
        let (eps, tile) = scale.map_or((0.0, NORM_TILE), |scale| (scale.eps, scale.tile));
        format_of(launch.float(eps).int(m).int(n).int(k).int(tile), &op.w).start()
    }

    fn skinny_config(
        &self,
        shape: GemmShape,
        form: SkinnyForm,
        kernel: SkinnyKernel,
        w: &Operand<'_>,
    ) -> Result<LaunchConfig, KernelError> {
        if matches!(kernel, SkinnyKernel::Ring { .. }) && self.properties().capability < (9, 0) {
            return Err(launch::refused(OP, "bulk copies need compute capability 9.0".to_owned()));
        }
        match w {
            Operand::Bf16(_) => launch::skinny_gemm(shape, form, kernel),
            Operand::E4m3(_) => launch::skinny_gemm_e4m3(ScaledBy::Rows, shape, form, kernel),
            Operand::E4m3Blocks(_) => launch::skinny_gemm_e4m3(ScaledBy::Blocks, shape, form, kernel),
            Operand::Int4(w) => launch::skinny_gemm_int4(shape, form, kernel, w.layout.group),
        }
    }
}

/// The numbers, then their scales if they have any.
fn read_weights<'a>(launch: Launch<'a>, w: &Operand<'_>) -> Launch<'a> {
    match w {
        Operand::Bf16(w) => launch.read(w),
        Operand::E4m3(Quantised { values, scales, .. }) | Operand::E4m3Blocks(Blocks { values, scales }) => {
            launch.read(values).read(scales)
        }
        Operand::Int4(Int4View { codes, groups, .. }) => launch.read(codes).read(groups),
    }
}

/// How groups of four bits are stored.
fn format_of<'a>(launch: Launch<'a>, w: &Operand<'_>) -> Launch<'a> {
    match w {
        Operand::Int4(Int4View { layout, .. }) => layout.pass(launch),
        Operand::Bf16(_) | Operand::E4m3(_) | Operand::E4m3Blocks(_) => launch,
    }
}
