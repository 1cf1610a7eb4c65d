"""Thins an unpacked vLLM for a bf16 Llama on Hopper: zeroes the CUDA code that such a run never loads.

usage: thin-vllm.py SITE      SITE holds the folder vllm; needs the zstd program

Files keep their layout and load as before (CUDA loads code when it is first called); the zeros compress away. What goes: FA3
for fp16 and fp8 inputs, and kernels of quantised, mixture-of-experts and state-space models.
"""

import mmap
import re
import struct
import subprocess
import sys
from pathlib import Path

FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
FA3_OTHER_INPUTS = re.compile(rb"CollectiveMainloopFwd\w*?ELi\d+ENS_(6half_t|12float_e4m3_t)EfNS_4arch")
OTHER_MODELS = re.compile(
    rb"scaled_mm|marlin|gptq|awq|cutlass|machete|mla|fp4|w4a8|sparse|gguf|mul_mat|moe|selective_scan|router_gemm"
    rb"|block_quant|paged_attention_v"
)
# Smaller pieces are not worth a mistake.
LEAST_BYTES = 100_000
THINNED = {
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": FA3_OTHER_INPUTS,
    "vllm/_C_stable_libtorch.abi3.so": OTHER_MODELS,
}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for name, unused in THINNED.items():
        thin(Path(sys.argv[1]) / name, unused)


def thin(path: Path, unused: re.Pattern) -> None:
    kept = zeroed = 0
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for begin, end, packed in list(entries(data)):
            if end - begin >= LEAST_BYTES and unused.search(kernel_names(data[begin : begin + packed])):
                data[begin:end] = bytes(end - begin)
                zeroed += end - begin
            else:
                kept += end - begin
        data.flush()
    print(f"{path.name}: {kept >> 20} MiB kept, {zeroed >> 20} MiB zeroed")


def entries(data: mmap.mmap):
    """Begin, end and packed size of every piece of device code in the fat binaries of a library."""
    at = data.find(FATBIN_MAGIC)
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        end = at + header + size
        if version != 1 or header != 16 or end > len(data):
            at = data.find(FATBIN_MAGIC, at + 4)
            continue
        entry = at + header
        while entry + 64 <= end:
            kind, _, header, size, packed = struct.unpack_from("<HHIQI", data, entry)
            begin = entry + header
            if kind not in (1, 2) or begin + size > end:
                break
            if any(data[begin : begin + 64]):
                yield begin, begin + size, packed or size
            entry = begin + size
        at = data.find(FATBIN_MAGIC, end)


def kernel_names(code: bytes) -> bytes:
    """The mangled names in a piece, unpacked if it is packed."""
    if code.startswith(ZSTD_MAGIC):
        code = subprocess.run(["zstd", "-dcq"], input=code, stdout=subprocess.PIPE, check=False).stdout
    return b" ".join(set(re.findall(rb"_Z\w{20,}", code)))


if __name__ == "__main__":
    main()
