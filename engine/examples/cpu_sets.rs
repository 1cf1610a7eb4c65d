//! The instruction sets that kernels of the CPU have here, best first.

use stoker_engine::ops::Isa;

fn main() {
    Isa::available().into_iter().for_each(|isa| println!("{isa}"));
}
