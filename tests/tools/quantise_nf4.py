#!/usr/bin/env python3
"""A checkpoint in NF4 in the form that bitsandbytes publishes, of one in bf16: sixteen levels of a normal distribution, of each 64
weights in a row the largest as their scale (Dettmers and others, 2023). Needs numpy, torch and safetensors; bitsandbytes itself writes
the goldens that the reader is held to (make_quantised_goldens.py).

    tests/tools/quantise_nf4.py MODEL OUT
"""

import json
import pathlib
import shutil
import sys

import torch
from safetensors.torch import load_file, save_file

LEVELS = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0]
    + [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)
BLOCK = 64
SETTINGS = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_compute_dtype": "bfloat16",
    "llm_int8_skip_modules": ["lm_head"],
    "llm_int8_threshold": 6.0,
}


def quantised(name, weight):
    blocks = weight.float().reshape(-1, BLOCK)
    scales = blocks.abs().amax(dim=1)
    codes = (blocks / scales[:, None]).unsqueeze(-1).sub(LEVELS).abs().argmin(dim=-1).to(torch.uint8).reshape(-1, 2)
    state = json.dumps({"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": list(weight.shape)})
    return {
        name: (codes[:, :1] << 4 | codes[:, 1:]).contiguous(),
        f"{name}.absmax": scales,
        f"{name}.quant_map": LEVELS.clone(),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(state.encode()), dtype=torch.uint8),
    }


def main(model, out):
    model, out = pathlib.Path(model), pathlib.Path(out)
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {}
    for name, weight in load_file(model / "model.safetensors").items():
        tensors.update(quantised(name, weight) if name.endswith("_proj.weight") else {name: weight})
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": SETTINGS}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) == 3 else print(__doc__)
