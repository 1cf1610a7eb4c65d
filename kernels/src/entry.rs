//! The kernels' entry points: which symbol of which source file, and how much shared memory it may be launched with. Chooses
//! nothing; `launch` does.

/// Three stages of 16 rows of 1024 values, 64 bytes of padding a row, and 20 KiB more: two blocks do not fit a multiprocessor of
/// 228 KiB, one beside a block of decode attention does.
pub(crate) const SKINNY_RING_BYTES: u32 = 3 * 16 * (1024 * 2 + 64) + (20 << 10);
/// Dynamic shared memory that a kernel may have without asking.
const SHARED_BYTES_UNASKED: u32 = 48 << 10;

macro_rules! entries {
    ($($variant:ident = $module:literal $name:literal,)*) => {
        /// A kernel's entry point.
        #[derive(Clone, Copy, Debug, Eq, PartialEq)]
        pub enum Entry { $(#[doc = concat!("`", $name, "` of `", $module, ".cu`.")] $variant,)* }

        impl Entry {
            /// All, in the order of their discriminants.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The source file's stem.
            pub fn module(self) -> &'static str {
                match self { $(Self::$variant => $module,)* }
            }

            /// The symbol in the module.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}

entries! {
    Embed = "embed" "embed",
    RmsNormV1 = "rms_norm" "rms_norm_v1",
    RmsNormV4 = "rms_norm" "rms_norm_v4",
    AddRmsNormV1 = "rms_norm" "add_rms_norm_v1",
    AddRmsNormV4 = "rms_norm" "add_rms_norm_v4",
    RmsNormE4m3V1 = "rms_norm" "rms_norm_e4m3_v1",
    RmsNormE4m3V4 = "rms_norm" "rms_norm_e4m3_v4",
    AddRmsNormE4m3V1 = "rms_norm" "add_rms_norm_e4m3_v1",
    AddRmsNormE4m3V4 = "rms_norm" "add_rms_norm_e4m3_v4",
    QuantiseRowsV1 = "quantise_rows" "quantise_rows_v1",
    QuantiseRowsV4 = "quantise_rows" "quantise_rows_v4",
    AnyNormV1 = "rms_norm" "rms_norm_any_v1",
    AnyNormV4 = "rms_norm" "rms_norm_any_v4",
    AddBias = "add_bias" "add_bias",
    SiluMul = "silu_mul" "silu_mul",
    GeluMul = "silu_mul" "gelu_mul",
    Softcap = "softcap" "softcap",
    RopeKvD64 = "rope_kv" "rope_kv_d64",
    RopeKvD128 = "rope_kv" "rope_kv_d128",
    RopeKvAny = "rope_kv" "rope_kv_any",
    RopeKvE4m3D64 = "rope_kv" "rope_kv_e4m3_d64",
    RopeKvE4m3D128 = "rope_kv" "rope_kv_e4m3_d128",
    RopeKvE4m3Any = "rope_kv" "rope_kv_e4m3_any",
    SkinnyBf16 = "skinny_gemm" "skinny_gemm_bf16",
    SkinnyF32 = "skinny_gemm" "skinny_gemm_f32",
    SkinnyUpdate = "skinny_gemm" "skinny_gemm_update",
    SkinnyScaledBf16 = "skinny_gemm" "skinny_gemm_scaled_bf16",
    SkinnyScaledF32 = "skinny_gemm" "skinny_gemm_scaled_f32",
    SkinnyGated = "skinny_gemm" "skinny_gemm_gated",
    SkinnyE4m3Bf16 = "skinny_gemm" "skinny_gemm_e4m3_bf16",
    SkinnyE4m3Update = "skinny_gemm" "skinny_gemm_e4m3_update",
    SkinnyE4m3Scaled = "skinny_gemm" "skinny_gemm_e4m3_scaled",
    SkinnyE4m3Gated = "skinny_gemm" "skinny_gemm_e4m3_gated",
    SkinnySm90Bf16 = "skinny_gemm_sm90" "skinny_gemm_sm90_bf16",
    SkinnySm90F32 = "skinny_gemm_sm90" "skinny_gemm_sm90_f32",
    SkinnySm90Update = "skinny_gemm_sm90" "skinny_gemm_sm90_update",
    SkinnySm90ScaledBf16 = "skinny_gemm_sm90" "skinny_gemm_sm90_scaled_bf16",
    SkinnySm90ScaledF32 = "skinny_gemm_sm90" "skinny_gemm_sm90_scaled_f32",
    SkinnySm90Gated = "skinny_gemm_sm90" "skinny_gemm_sm90_gated",
    SkinnySm90E4m3Bf16 = "skinny_gemm_sm90" "skinny_gemm_sm90_e4m3_bf16",
    SkinnySm90E4m3Update = "skinny_gemm_sm90" "skinny_gemm_sm90_e4m3_update",
    SkinnySm90E4m3Scaled = "skinny_gemm_sm90" "skinny_gemm_sm90_e4m3_scaled",
    SkinnySm90E4m3Gated = "skinny_gemm_sm90" "skinny_gemm_sm90_e4m3_gated",
    Gemm1x8Bf16 = "gemm_sm90" "gemm_sm90_1x8_bf16",
    Gemm1x8F32 = "gemm_sm90" "gemm_sm90_1x8_f32",
    Gemm1x8Activated = "gemm_sm90" "gemm_sm90_1x8_activated",
    Gemm1x8Updated = "gemm_sm90" "gemm_sm90_1x8_updated",
    Gemm2x8Bf16 = "gemm_sm90" "gemm_sm90_2x8_bf16",
    Gemm2x8F32 = "gemm_sm90" "gemm_sm90_2x8_f32",
    Gemm2x8Activated = "gemm_sm90" "gemm_sm90_2x8_activated",
    Gemm1x32Bf16 = "gemm_sm90" "gemm_sm90_1x32_bf16",
    Gemm1x32F32 = "gemm_sm90" "gemm_sm90_1x32_f32",
    Gemm1x32Activated = "gemm_sm90" "gemm_sm90_1x32_activated",
    Gemm1x32Updated = "gemm_sm90" "gemm_sm90_1x32_updated",
    Gemm2x32Bf16 = "gemm_sm90" "gemm_sm90_2x32_bf16",
    Gemm2x32F32 = "gemm_sm90" "gemm_sm90_2x32_f32",
    Gemm2x32Activated = "gemm_sm90" "gemm_sm90_2x32_activated",
    Gemm1x64Bf16 = "gemm_sm90" "gemm_sm90_1x64_bf16",
    Gemm1x64F32 = "gemm_sm90" "gemm_sm90_1x64_f32",
    Gemm1x64Activated = "gemm_sm90" "gemm_sm90_1x64_activated",
    Gemm1x64Updated = "gemm_sm90" "gemm_sm90_1x64_updated",
    Gemm2x64Bf16 = "gemm_sm90" "gemm_sm90_2x64_bf16",
    Gemm2x64F32 = "gemm_sm90" "gemm_sm90_2x64_f32",
    Gemm2x64Activated = "gemm_sm90" "gemm_sm90_2x64_activated",
    Gemm1x128Bf16 = "gemm_sm90" "gemm_sm90_1x128_bf16",
    Gemm1x128F32 = "gemm_sm90" "gemm_sm90_1x128_f32",
    Gemm1x128Activated = "gemm_sm90" "gemm_sm90_1x128_activated",
    Gemm1x128Updated = "gemm_sm90" "gemm_sm90_1x128_updated",
    Gemm2x128Bf16 = "gemm_sm90" "gemm_sm90_2x128_bf16",
    Gemm2x128F32 = "gemm_sm90" "gemm_sm90_2x128_f32",
    Gemm2x128Activated = "gemm_sm90" "gemm_sm90_2x128_activated",
    Gemm2x256Bf16 = "gemm_sm90" "gemm_sm90_2x256_bf16",
    Gemm2x256F32 = "gemm_sm90" "gemm_sm90_2x256_f32",
    Gemm2x256Activated = "gemm_sm90" "gemm_sm90_2x256_activated",
    Gemm1x32SplitBf16 = "gemm_sm90" "gemm_sm90_1x32_split_bf16",
    Gemm1x32SplitActivated = "gemm_sm90" "gemm_sm90_1x32_split_activated",
    Gemm1x32SplitUpdated = "gemm_sm90" "gemm_sm90_1x32_split_updated",
    Gemm1x64SplitBf16 = "gemm_sm90" "gemm_sm90_1x64_split_bf16",
    Gemm1x64SplitActivated = "gemm_sm90" "gemm_sm90_1x64_split_activated",
    Gemm1x64SplitUpdated = "gemm_sm90" "gemm_sm90_1x64_split_updated",
    Gemm1x128SplitBf16 = "gemm_sm90" "gemm_sm90_1x128_split_bf16",
    Gemm1x128SplitActivated = "gemm_sm90" "gemm_sm90_1x128_split_activated",
    Gemm1x128SplitUpdated = "gemm_sm90" "gemm_sm90_1x128_split_updated",
    Gemm2x128SplitBf16 = "gemm_sm90" "gemm_sm90_2x128_split_bf16",
    Gemm2x128SplitActivated = "gemm_sm90" "gemm_sm90_2x128_split_activated",
    GemmE4m31x8Bf16 = "gemm_fp8_sm90" "gemm_fp8_sm90_1x8_bf16",
    GemmE4m31x8Activated = "gemm_fp8_sm90" "gemm_fp8_sm90_1x8_activated",
    GemmE4m32x8Bf16 = "gemm_fp8_sm90" "gemm_fp8_sm90_2x8_bf16",
    GemmE4m32x8Activated = "gemm_fp8_sm90" "gemm_fp8_sm90_2x8_activated",
    GemmE4m31x32Bf16 = "gemm_fp8_sm90" "gemm_fp8_sm90_1x32_bf16",
    GemmE4m31x32Activated = "gemm_fp8_sm90" "gemm_fp8_sm90_1x32_activated",
    GemmE4m32x32Bf16 = "gemm_fp8_sm90" "gemm_fp8_sm90_2x32_bf16",
    GemmE4m32x32Activated = "gemm_fp8_sm90" "gemm_fp8_sm90_2x32_activated",
    GemmE4m31x64Bf16 = "gemm_fp8_sm90" "gemm_fp8_sm90_1x64_bf16",
    GemmE4m31x64Activated = "gemm_fp8_sm90" "gemm_fp8_sm90_1x64_activated",
    GemmE4m32x64Bf16 = "gemm_fp8_sm90" "gemm_fp8_sm90_2x64_bf16",
    GemmE4m32x64Activated = "gemm_fp8_sm90" "gemm_fp8_sm90_2x64_activated",
    GemmE4m31x128Bf16 = "gemm_fp8_sm90" "gemm_fp8_sm90_1x128_bf16",
    GemmE4m31x128Activated = "gemm_fp8_sm90" "gemm_fp8_sm90_1x128_activated",
    GemmE4m32x128Bf16 = "gemm_fp8_sm90" "gemm_fp8_sm90_2x128_bf16",
    GemmE4m32x128Activated = "gemm_fp8_sm90" "gemm_fp8_sm90_2x128_activated",
    GemmE4m32x256Bf16 = "gemm_fp8_sm90" "gemm_fp8_sm90_2x256_bf16",
    GemmE4m32x256Activated = "gemm_fp8_sm90" "gemm_fp8_sm90_2x256_activated",
    GemmE4m31x32SplitBf16 = "gemm_fp8_sm90" "gemm_fp8_sm90_1x32_split_bf16",
    GemmE4m31x32SplitActivated = "gemm_fp8_sm90" "gemm_fp8_sm90_1x32_split_activated",
    GemmE4m31x64SplitBf16 = "gemm_fp8_sm90" "gemm_fp8_sm90_1x64_split_bf16",
    GemmE4m31x64SplitActivated = "gemm_fp8_sm90" "gemm_fp8_sm90_1x64_split_activated",
    GemmE4m31x128SplitBf16 = "gemm_fp8_sm90" "gemm_fp8_sm90_1x128_split_bf16",
    GemmE4m31x128SplitActivated = "gemm_fp8_sm90" "gemm_fp8_sm90_1x128_split_activated",
    GemmE4m32x128SplitBf16 = "gemm_fp8_sm90" "gemm_fp8_sm90_2x128_split_bf16",
    GemmE4m32x128SplitActivated = "gemm_fp8_sm90" "gemm_fp8_sm90_2x128_split_activated",
    PagedDecodeD64 = "paged_decode" "paged_decode_d64",
    PagedDecodeD128 = "paged_decode" "paged_decode_d128",
    PagedDecodeAny64 = "paged_decode" "paged_decode_any64",
    PagedDecodeAny128 = "paged_decode" "paged_decode_any128",
    PagedDecodeAny256 = "paged_decode" "paged_decode_any256",
    PagedDecodeE4m3D64 = "paged_decode" "paged_decode_e4m3_d64",
    PagedDecodeE4m3D128 = "paged_decode" "paged_decode_e4m3_d128",
    PagedDecodeE4m3Any64 = "paged_decode" "paged_decode_e4m3_any64",
    PagedDecodeE4m3Any128 = "paged_decode" "paged_decode_e4m3_any128",
    PagedDecodeE4m3Any256 = "paged_decode" "paged_decode_e4m3_any256",
    PagedPrefillD64 = "paged_prefill" "paged_prefill_d64",
    PagedPrefillD128 = "paged_prefill" "paged_prefill_d128",
    PagedPrefillAny64 = "paged_prefill" "paged_prefill_any64",
    PagedPrefillAny128 = "paged_prefill" "paged_prefill_any128",
    PagedPrefillAny256 = "paged_prefill" "paged_prefill_any256",
    PagedPrefillE4m3D64 = "paged_prefill" "paged_prefill_e4m3_d64",
    PagedPrefillE4m3D128 = "paged_prefill" "paged_prefill_e4m3_d128",
    PagedPrefillE4m3Any64 = "paged_prefill" "paged_prefill_e4m3_any64",
    PagedPrefillE4m3Any128 = "paged_prefill" "paged_prefill_e4m3_any128",
    PagedPrefillE4m3Any256 = "paged_prefill" "paged_prefill_e4m3_any256",
    PagedPrefillSm90D64 = "paged_prefill_sm90" "paged_prefill_sm90_d64",
    PagedPrefillSm90D128 = "paged_prefill_sm90" "paged_prefill_sm90_d128",
    PagedPrefillSm90Any64 = "paged_prefill_sm90" "paged_prefill_sm90_any64",
    PagedPrefillSm90Any128 = "paged_prefill_sm90" "paged_prefill_sm90_any128",
    PagedPrefillSm90E4m3D64 = "paged_prefill_sm90" "paged_prefill_sm90_e4m3_d64",
    PagedPrefillSm90E4m3D128 = "paged_prefill_sm90" "paged_prefill_sm90_e4m3_d128",
    PagedPrefillSm90E4m3Any64 = "paged_prefill_sm90" "paged_prefill_sm90_e4m3_any64",
    PagedPrefillSm90E4m3Any128 = "paged_prefill_sm90" "paged_prefill_sm90_e4m3_any128",
    FeedTokens = "feed_tokens" "feed_tokens",
    MarkTokens = "mark_tokens" "mark_tokens",
    SamplingFloorSm90E16 = "sampling_floor_sm90" "sampling_floor_sm90_e16",
    SamplingFloorSm90E32 = "sampling_floor_sm90" "sampling_floor_sm90_e32",
    Sample = "sample" "sample",
    SampleOptions = "sample_options" "sample_options",
    UnpackF32 = "unpack_blocks" "unpack_f32",
    UnpackF16 = "unpack_blocks" "unpack_f16",
    UnpackQ8_0 = "unpack_blocks" "unpack_q8_0",
    UnpackQ4_0 = "unpack_blocks" "unpack_q4_0",
    UnpackQ4_1 = "unpack_blocks" "unpack_q4_1",
    UnpackQ5_0 = "unpack_blocks" "unpack_q5_0",
    UnpackQ5_1 = "unpack_blocks" "unpack_q5_1",
    UnpackQ4K = "unpack_blocks" "unpack_q4_k",
    UnpackQ5K = "unpack_blocks" "unpack_q5_k",
    UnpackQ6K = "unpack_blocks" "unpack_q6_k",
}

impl Entry {
    /// Dynamic shared memory that the entry point may be launched with, if it is more than any kernel may have.
    pub fn shared_bytes_asked(self) -> Option<u32> {
        let most = match self.module() {
            "paged_decode" | "paged_prefill" => 96 << 10,
            "paged_prefill_sm90" => 193 << 10,
            "skinny_gemm_sm90" => SKINNY_RING_BYTES,
            "gemm_sm90" | "gemm_fp8_sm90" => crate::gemm::SHARED_BYTES as u32,
            _ => 0,
        };
        (most > SHARED_BYTES_UNASKED).then_some(most)
    }
}
