use super::*;

const H200: Properties =
    Properties { n_multiprocessors: 132, capability: (9, 0), l2_bytes: 60 << 20, shared_bytes_max: 227 << 10 };
const RING: GemmKernel = GemmKernel::Skinny(SkinnyKernel::Ring { n_multiprocessors: 132 });
const REGISTERS: GemmKernel = GemmKernel::Skinny(SkinnyKernel::Registers);
const EPILOGUES: [Epilogue; 5] = [Epilogue::Bf16, Epilogue::F32, Epilogue::Sum, Epilogue::Gated, Epilogue::Update];

/// A chip that nothing was measured on.
fn chip(capability: (i32, i32)) -> Chip {
    Chip::new("of no table", Properties { capability, ..H200 }, Numerics::Fastest, Some(130_100)).unwrap()
}

fn plain(m: usize, n: usize, k: usize, epilogue: Epilogue) -> GemmDesc {
    GemmDesc { shape: GemmShape { m, n, k }, operands: Operands::Bf16, prologue: Prologue::Plain, epilogue }
}

fn scaled(m: usize, n: usize, epilogue: Epilogue) -> GemmDesc {
    GemmDesc { prologue: Prologue::NormScaled, ..plain(m, n, 4096, epilogue) }
}

fn first_guess(rows: usize) -> Option<GemmKernel> {
    Some(GemmKernel::CublasLt(Algorithm { rows, rank: 0 }))
}

fn is_tiled(kernel: Option<GemmKernel>) -> bool {
    matches!(kernel, Some(GemmKernel::Tiled(_)))
}

#[test]
fn one_row_takes_the_ring_where_there_is_room_for_x_and_registers_where_not() {
    let chosen = |n, k, capability| chip(capability).choose(plain(1, n, k, Epilogue::Bf16));
    assert_eq!([(6144, 4096), (28_672, 4096), (8192, 28_672)].map(|(n, k)| chosen(n, k, (9, 0))), [Some(RING); 3]);
    assert_eq!(chip((9, 0)).choose(scaled(1, 128_256, Epilogue::F32)), Some(RING));
    assert_eq!(chosen(4096, 80 << 10, (9, 0)), Some(REGISTERS));
    assert_eq!([(8, 0), (12, 0)].map(|capability| chosen(6144, 4096, capability)), [Some(REGISTERS); 2]);
}

#[test]
fn a_few_rows_are_ours_on_hopper_and_logits_cublaslts() {
    let hopper = chip((9, 0));
    for m in [2, 8, 32] {
        assert!(is_tiled(hopper.choose(plain(m, 6144, 4096, Epilogue::Bf16))), "{m}");
        assert!(is_tiled(hopper.choose(plain(m, 4096, 14336, Epilogue::Update))), "{m}");
        assert!(is_tiled(hopper.choose(scaled(m, 28_672, Epilogue::Gated))), "{m}");
        assert_eq!(hopper.choose(plain(m, 128_256, 4096, Epilogue::F32)), first_guess(m));
        assert_eq!(hopper.choose(scaled(m, 128_256, Epilogue::F32)), None);
    }
}

#[test]
fn other_chips_have_the_ring_or_registers_for_few_rows_of_small_weights() {
    let chosen = |m, n, capability| chip(capability).choose(plain(m, n, 4096, Epilogue::Bf16));
    assert_eq!([chosen(8, 6144, (10, 0)), chosen(8, 28_672, (10, 0))], [Some(RING), first_guess(8)]);
    assert_eq!(chosen(8, 6144, (8, 0)), first_guess(8));
}

#[test]
fn norms_and_additions_are_inside_where_our_kernels_multiply_and_the_addition_where_rows_are_many() {
    let answered = |m, capability| {
        [Epilogue::Update, Epilogue::Sum, Epilogue::Bf16]
            .map(|epilogue| chip(capability).choose(plain(m, 4096, 4096, epilogue)).is_some())
    };
    assert_eq!([1, 2, 32].map(|m| answered(m, (9, 0))), [[true, false, true]; 3]);
    assert_eq!([33, 511].map(|m| answered(m, (9, 0))), [[false, false, true]; 2]);
    assert_eq!([512, 8192].map(|m| answered(m, (9, 0))), [[false, true, true]; 2]);
    assert_eq!([1, 2].map(|m| answered(m, (8, 0))), [[true, false, true], [false, false, true]]);
}

#[test]
fn every_plain_product_is_multiplied_by_someone_and_who_is_chosen_can() {
    for numerics in [Numerics::Fastest, Numerics::BatchInvariant] {
        for capability in [(8, 0), (9, 0), (10, 0)] {
            let properties = Properties { capability, ..H200 };
            let Ok(chip) = Chip::new("of no table", properties, numerics, None) else { continue };
            for m in [1, 2, 8, 9, 32, 33, 100, 512, 513, 8192] {
                for (n, k) in [(16, 8), (4097, 4096), (28_672, 4096), (128, 72)] {
                    for epilogue in EPILOGUES {
                        let desc = plain(m, n, k, epilogue);
                        let found = chip.choose(desc);
                        let must = matches!(epilogue, Epilogue::Bf16 | Epilogue::F32);
                        assert!(found.is_some() || !must, "{desc:?} {numerics:?} {capability:?}");
                        assert!(found.is_none_or(|kernel| kernel.fits(desc)), "{desc:?} {found:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn weights_of_four_bits_are_ours_at_any_number_of_rows_and_of_few_with_norms_and_additions_inside() {
    let int4 = |desc: GemmDesc| GemmDesc { operands: Operands::Int4, ..desc };
    let hopper = chip((9, 0));
    for m in [1, 2, 16, 32, 33, 256, 8192] {
        let is_few = m <= 32;
        for (n, k) in [(6144, 4096), (4096, 14_336), (28_672, 4096)] {
            assert!(hopper.choose(int4(plain(m, n, k, Epilogue::Bf16))).is_some(), "{m} {n}");
            assert_eq!(hopper.choose(int4(plain(m, n, k, Epilogue::Update))).is_some(), is_few, "{m} {n}");
            assert_eq!(hopper.choose(int4(plain(m, n, k, Epilogue::Sum))), None);
        }
        assert_eq!(hopper.choose(int4(scaled(m, 28_672, Epilogue::Gated))).is_some(), is_few, "{m}");
    }
    for (n, k, epilogue) in
        [(4096, 14_336, Epilogue::Update), (28_672, 4096, Epilogue::Gated), (96, 4096, Epilogue::Bf16)]
    {
        assert_eq!(hopper.choose(int4(plain(1, n, k, epilogue))), Some(RING));
    }
    // To 16 rows warps share the depth, unless rows of x end inside of a panel; tiles of 128 weight rows were measured to be 2 % faster.
    for (m, n, k, epilogue, tile) in [
        (2, 4096, 14_336, Epilogue::Update, "4x8w/32"),
        (8, 28_672, 4096, Epilogue::Gated, "4x8w/112"),
        (9, 28_672, 4096, Epilogue::Gated, "4x16w/112"),
    ] {
        assert_eq!(
            hopper.choose(int4(plain(m, n, k, epilogue))),
            Some(GemmKernel::Tiled(tile.parse().unwrap())),
            "{m}"
        );
    }
    let unwhole = hopper.choose(int4(plain(2, 4096, 4096 + 32, Epilogue::Bf16)));
    assert!(matches!(unwhole, Some(GemmKernel::Tiled(tile)) if !tile.is_by_warps()), "{unwhole:?}");
    assert_eq!(chip((8, 0)).choose(int4(plain(1, 4096, 4096, Epilogue::Bf16))), None);
    let invariant = Chip::new("of no table", H200, Numerics::BatchInvariant, None).unwrap();
    for m in [1, 32, 300] {
        let found = invariant.choose(int4(plain(m, 4096, 4096, Epilogue::Bf16)));
        assert!(matches!(found, Some(GemmKernel::Tiled(tile)) if !tile.splits_depth()), "{m} {found:?}");
        assert_eq!(invariant.choose(int4(plain(m, 4096, 4096, Epilogue::Update))), None);
    }
    assert!(!hopper.candidates(int4(plain(64, 6144, 4096, Epilogue::Bf16))).contains(&Entry::CublasLt(0)));
}

#[test]
fn where_bits_count_codes_in_groups_of_128_are_beside_e4m3_at_any_number_of_rows_and_one_takes_a_ring() {
    let wide = WeightFormat::Int4(GroupSize::G128);
    let invariant = Chip::new("of no table", H200, Numerics::BatchInvariant, None).unwrap();
    let of = |stored, m, k| invariant.multiplied_as(stored, GemmShape { m, n: 4096, k }, QuantisedBy::Launch);
    for m in [1, 2, 16, 17, 640, 641, 8192] {
        assert_eq!(of((wide, false), m, 4096), Operands::Int4BesideE4m3, "{m}");
        let others = [(wide, true), (WeightFormat::Int4(GroupSize::G32), false)];
        assert_eq!(others.map(|stored| of(stored, m, 4096)), [Operands::Int4; 2], "{m}");
        assert_eq!(of((wide, false), m, 4096 + 64), Operands::Int4, "{m}");
    }
    let beside = |m, epilogue| GemmDesc { operands: Operands::Int4BesideE4m3, ..plain(m, 4096, 14_336, epilogue) };
    for epilogue in [Epilogue::Bf16, Epilogue::Gated] {
        assert_eq!(invariant.choose(beside(1, epilogue)), Some(GemmKernel::QuantisingRing));
        for m in [2, 8, 300, 8192] {
            let found = invariant.choose(beside(m, epilogue));
            assert!(matches!(found, Some(GemmKernel::Tiled(tile)) if !tile.splits_depth()), "{m} {found:?}");
        }
    }
    let normed = |m, k| {
        let shape = GemmShape { m, n: 28_672, k };
        invariant.choose(GemmDesc { shape, prologue: Prologue::Normed, ..beside(m, Epilogue::Gated) })
    };
    let ring = Some(GemmKernel::QuantisingRing);
    assert_eq!([normed(1, 4096), normed(1, 8192), normed(2, 4096)], [ring, None, None]);
    assert_eq!([1, 2].map(|m| invariant.choose(beside(m, Epilogue::Sum))), [ring, None]);
    assert_eq!(invariant.choose(beside(1, Epilogue::Update)), None);
}

#[test]
fn weights_in_blocks_of_e4m3_are_ours_at_any_number_of_rows() {
    let blocks = |desc: GemmDesc| GemmDesc { operands: Operands::E4m3Blocks, ..desc };
    let hopper = chip((9, 0));
    let invariant = Chip::new("of no table", H200, Numerics::BatchInvariant, None).unwrap();
    for (n, k) in [(6144, 4096), (4096, 14_336), (28_672, 4096), (24, 48)] {
        assert_eq!(hopper.choose(blocks(plain(1, n, k, Epilogue::Update))), Some(RING));
        for m in [1, 2, 16, 33, 256, 8192] {
            let found = hopper.choose(blocks(plain(m, n, k, Epilogue::Bf16)));
            assert!(found.is_some_and(|kernel| kernel == RING || m > 1), "{m} {n} {found:?}");
            let found = invariant.choose(blocks(plain(m, n, k, Epilogue::Bf16)));
            assert!(matches!(found, Some(GemmKernel::Tiled(tile)) if !tile.splits_depth()), "{m} {n} {found:?}");
        }
    }
    // A row that has no room beside a ring.
    let deep = hopper.choose(blocks(plain(1, 4096, 131_072, Epilogue::Bf16)));
    assert!(matches!(deep, Some(GemmKernel::Tiled(_))), "{deep:?}");
    assert_eq!(chip((8, 0)).choose(blocks(plain(2, 4096, 4096, Epilogue::Bf16))), None);
}

#[test]
fn a_residual_of_odd_width_is_not_updated_by_some_rows() {
    assert_eq!(chip((9, 0)).choose(plain(2, 4097, 4096, Epilogue::Update)), None);
}

#[test]
fn the_batch_invariant_mode_takes_one_launch_for_one_sum_and_never_splits_the_depth() {
    let chip = Chip::new("of no table", H200, Numerics::BatchInvariant, None).unwrap();
    for m in [1, 8, 64, 300, 8192] {
        for epilogue in [Epilogue::Bf16, Epilogue::F32, Epilogue::Gated] {
            let found = chip.choose(plain(m, 4096, 4096, epilogue));
            assert!(matches!(found, Some(GemmKernel::Tiled(tile)) if !tile.splits_depth()), "{m} {found:?}");
        }
        assert_eq!(chip.choose(plain(m, 4096, 4096, Epilogue::Update)), None);
        assert_eq!(chip.choose(plain(m, 4096, 4096, Epilogue::Sum)), None);
        assert_eq!(chip.choose(scaled(m, 4096, Epilogue::Bf16)), None);
    }
    let refusal = Chip::new("", Properties { capability: (8, 0), ..H200 }, Numerics::BatchInvariant, None);
    assert!(matches!(refusal.unwrap_err(), KernelError::NotInvariant { major: 8, minor: 0 }));
}

#[test]
fn what_was_measured_decides_and_the_nearest_shape_says_who_multiplies_others() {
    let mut chip = chip((9, 0));
    let (qkv, gated) = (plain(64, 6144, 4096, Epilogue::Bf16), plain(64, 28_672, 4096, Epilogue::Gated));
    assert_eq!(chip.choose(qkv), first_guess(64));
    assert!(is_tiled(chip.choose(gated)));
    let tile = "1x64s/48".parse().unwrap();
    chip.set_measured(qkv, Entry::Tile(tile));
    chip.set_measured(gated, Entry::Apart);
    assert_eq!(chip.choose(plain(40, 6144, 4096, Epilogue::Bf16)), Some(GemmKernel::Tiled(tile)));
    assert!(is_tiled(chip.choose(plain(40, 5000, 4096, Epilogue::Bf16))));
    assert_eq!(chip.choose(plain(65, 6144, 4096, Epilogue::Bf16)), first_guess(65));
    assert_eq!(chip.choose(gated), None);
}

#[test]
fn a_guess_behind_the_first_is_taken_of_the_version_that_was_measured_only() {
    let mut chip = chip((9, 0));
    let desc = plain(64, 6144, 4096, Epilogue::Bf16);
    chip.set_measured(desc, Entry::CublasLt(3));
    assert_eq!(chip.choose(desc), Some(GemmKernel::CublasLt(Algorithm { rows: 64, rank: 3 })));
    chip.cublaslt = Some(130_200);
    assert_eq!(chip.choose(desc), first_guess(64));
}

#[test]
fn a_measured_tile_that_does_not_scale_is_not_taken_where_rows_have_factors() {
    let mut chip = chip((9, 0));
    let desc = scaled(32, 6144, Epilogue::Bf16);
    chip.set_measured(desc, Entry::Tile("2x256/128".parse().unwrap()));
    let Some(GemmKernel::Tiled(tile)) = chip.choose(desc) else { panic!("ours") };
    assert!(tile.scales());
}

#[test]
fn candidates_hold_what_the_chip_chooses_and_are_ours_alone_where_norms_are_inside() {
    let chip = chip((9, 0));
    let of = |m, epilogue| chip.candidates(plain(m, 4096, 4096, epilogue));
    assert!(of(8, Epilogue::Update).iter().all(|entry| matches!(entry, Entry::Tile(_))));
    assert!(!of(8, Epilogue::Update).is_empty());
    let some = of(64, Epilogue::Bf16);
    assert!(some.contains(&Entry::CublasLt(0)) && some.iter().any(|entry| matches!(entry, Entry::Tile(_))));
    assert_eq!(of(64, Epilogue::Gated).last(), Some(&Entry::Apart));
    assert!(of(64, Epilogue::F32).iter().all(|entry| matches!(entry, Entry::CublasLt(_))));
    assert_eq!(of(1, Epilogue::Bf16), []);
}
