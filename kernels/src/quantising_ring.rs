//! The product of one row that it quantises itself, with weights of four bits in groups of 128 (`csrc/skinny_int4_e4m3_sm90.cu`): the bits of the
//! tiles beside rows in e4m3. Checks buffers; chooses nothing.

use crate::{
    KernelError, Kernels, check_len,
    int4::GroupSize,
    launch::{self, refused},
    linear::{self, Linear, Operand, Output},
    ranks::NormOf,
};

const OP: &str = "skinny_int4_e4m3";

impl Kernels {
    /// Multiplies a row of bf16; with `norm` it is the residual stream, whose norm is multiplied. What is added to `y` is rounded before.
    pub fn gemm_quantising(&self, op: Linear<'_>, norm: Option<NormOf<'_>>) -> Result<(), KernelError> {
        let (shape, epilogue) = (op.shape, op.y.epilogue());
        self.check_chip()?;
        linear::check(OP, &op)?;
        let (Operand::Int4(w), Operand::Bf16(x)) = (&op.w, &op.x) else {
            return Err(refused(OP, "it multiplies a row of bf16 with weights of four bits".to_owned()));
        };
        let is_wide = w.layout.group == GroupSize::G128;
        if !is_wide || !launch::fits_quantising_ring(shape, epilogue, norm.is_some()) {
            return Err(refused(OP, format!("{shape:?} to {epilogue:?} is not for one row and whole groups of 128")));
        }
        if let Some(norm) = &norm {
            check_len(OP, "the norm's weight", norm.weight.len(), shape.k)?;
        }
        let config = launch::quantising_ring(shape, epilogue, self.properties().n_multiprocessors)?;
        let launch = self.functions.launch(OP, config);
        let launch = match op.y {
            Output::Bf16(mut y) | Output::Sum(mut y) | Output::Gated(mut y) => launch.write(&mut y),
            Output::F32(_) => return Err(refused(OP, "logits are of weights in bf16".to_owned())),
        };
        let launch = launch.read(&w.codes).read(&w.groups).read(x);
        let launch = launch.read_optional(norm.as_ref().map(|norm| &norm.weight));
        let launch = launch.float(norm.as_ref().map_or(0.0, |norm| norm.eps)).int(shape.n).int(shape.k);
        w.layout.pass(launch).start()
    }
}
