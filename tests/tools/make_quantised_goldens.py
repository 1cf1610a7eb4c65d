#!/usr/bin/env python3
"""Writes the goldens of quantised checkpoints: tiny ones made by the libraries whose formats they are, what those libraries
dequantise, and what Hugging Face transformers computes with it.

    python3 -m venv VENV && VENV/bin/pip install torch==2.11.0 transformers==5.23.0 safetensors==0.8.0 tokenizers==0.23.3 \\
        accelerate==1.15.0 compressed-tensors==0.20.0 bitsandbytes==0.50.2 loguru pydantic psutil
    VENV/bin/pip install --no-deps autoawq==0.2.9 gptqmodel==7.7.0 logbar device-smi tokenicer defuser && VENV/bin/pip install requests datasets pillow threadpoolctl
    VENV/bin/python tests/tools/make_quantised_goldens.py [NAME ...]

Each is the Llama of `make_family_goldens.py` with its weights, its projections quantised. tests/goldens/quantised/NAME has
- `config.json`: with the `quantization_config` that the library writes;
- `quantised.safetensors`: the tensors of quantised projections as the library writes them;
- `golden.json`: `tensors`, `weights_sha256`: all other tensors, by the formula of `make_family_goldens.py`, in the number format
  `stored`; `dequantised`: of each quantised projection the SHA-256 of its numbers as the library dequantises it, in the format
  `stored`, which this script has compared with the formula in float64; `tokens`, `ids`, `rows`, `greedy`: what transformers computes in float32 with these numbers; where `stored` is bf16,
  `rows_bf16` and `noise_floor` too, as in `make_family_goldens.py`. Of integers `noise_floor_8_bits`: how far the rows move,
  relative to the largest logit, when what enters quantised matrices is rounded to blocks of 8 bits as Q8_0 has them.
"""

import argparse
import copy
import hashlib
import json
import pathlib

import numpy
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, __version__

import make_family_goldens as family

GOLDENS = pathlib.Path(__file__).resolve().parent.parent / "goldens" / "quantised"
DTYPES = dict(F32=torch.float32, Bf16=torch.bfloat16, F16=torch.float16)


def transformers_fp8(block, left_alone=(), **extra):
    """`fp8` by the operations with which transformers quantises and loads."""
    def quantise(weights):
        from types import SimpleNamespace

        from transformers import FineGrainedFP8Config
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

        config = FineGrainedFP8Config(weight_block_size=block, modules_to_not_convert=list(left_alone) or None, **extra)
        quantiser = SimpleNamespace(quantization_config=config)
        tensors, dequantised = {}, {}
        for module, weight in weights.items():
            if any(module.startswith(name) or module.endswith(name) for name in left_alone):
                continue
            made = Fp8Quantize(quantiser).convert({f"{module}.weight": weight})
            scales = made[f"{module}.weight_scale_inv"]
            if block is None:
                made[f"{module}.weight_scale_inv"] = scales.reshape(())
            tensors.update(made)
            dequantised[module] = Fp8Dequantize(quantiser)._dequantize_one(made[f"{module}.weight"], scales, weight.dtype)
        return tensors, dequantised, config.to_dict(), f"transformers {__version__}"
    return quantise


def auto_fp8():
    """`fp8` as AutoFP8 published it, which is gone: one scale a tensor, largest / 448, and a scale of activations."""
    def quantise(weights):
        tensors, dequantised = {}, {}
        for module, weight in weights.items():
            scale = (weight.double().abs().max() / 448).float()
            codes = (weight.double() / scale.double()).float().to(torch.float8_e4m3fn)
            tensors |= {f"{module}.weight": codes, f"{module}.weight_scale": scale.reshape(1),
                        f"{module}.input_scale": torch.ones(1)}
            dequantised[module] = (codes.double() * scale.double()).to(weight.dtype)
        config = dict(quant_method="fp8", activation_scheme="static", ignored_layers=["lm_head"])
        return tensors, dequantised, config, "the formula of AutoFP8 in float64"
    return quantise


def fbgemm():
    """`fbgemm_fp8` by the formula of fbgemm's quantize_fp8_per_row, which needs a GPU: largest of a row / 448."""
    def quantise(weights):
        tensors, dequantised = {}, {}
        for module, weight in weights.items():
            scales = (weight.double().abs().amax(1, keepdim=True) / 448).float()
            codes = (weight.double() / scales.double()).float().to(torch.float8_e4m3fn)
            tensors |= {f"{module}.weight": codes, f"{module}.weight_scale": scales}
            dequantised[module] = (codes.double() * scales.double()).to(weight.dtype)
        config = dict(quant_method="fbgemm_fp8", activation_scale_ub=1200.0, modules_to_not_convert=["lm_head"])
        return tensors, dequantised, config, "the formula of fbgemm in float64"
    return quantise


def compressed_tensors(weights_args, input_args=None, ignore=("lm_head",), targets=("Linear",)):
    """By compressed-tensors: its observer's formula for scales, its compressor, and its decompressor."""
    return mixture([(targets, weights_args, input_args)], ignore)


def mixture(groups, ignore=("lm_head",)):
    """The same with several groups of modules, each quantised in its own way."""
    def quantise(weights):
        import compressed_tensors as library
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.compressors.format import infer_module_format
        from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
        from compressed_tensors.utils import match_name

        def scheme_of(targets, weights_args, input_args):
            scheme = QuantizationScheme(targets=list(targets), weights=QuantizationArgs(**weights_args),
                                        input_activations=input_args and QuantizationArgs(**input_args))
            form = infer_module_format(torch.nn.Linear, scheme).value
            if len(groups) > 1:
                scheme.format = form
            return scheme, form, input_args

        schemes = [scheme_of(*group) for group in groups]
        tensors, dequantised = {}, {}
        for module, weight in weights.items():
            if any(match_name(module, name) for name in ignore):
                continue
            is_meant = lambda scheme: any(name == "Linear" or match_name(module, name) for name in scheme.targets)
            scheme, form, input_args = next(it for it in schemes if is_meant(it[0]))
            args, compressor = scheme.weights, BaseCompressor.get_value_from_registry(form)
            scales, zero_points = scales_of(weight, args)
            state = dict(weight=weight, weight_scale=scales.to(weight.dtype))
            if not args.symmetric:
                state["weight_zero_point"] = zero_points.to(torch.int8)
            made = compressor.compress(state, scheme)
            dequantised[module] = compressor.decompress(dict(made), scheme)["weight"]
            if input_args and not input_args.get("dynamic"):
                made["input_scale"] = torch.ones(1, dtype=weight.dtype)
            tensors |= {f"{module}.{name}": tensor.contiguous() for name, tensor in made.items()}
        named = {f"group_{at}": scheme for at, (scheme, *_) in enumerate(schemes)}
        form = "mixed-precision" if len(schemes) > 1 else schemes[0][1]
        config = QuantizationConfig(config_groups=named, format=form, ignore=list(ignore),
                                    quantization_status="compressed").model_dump(mode="json")
        return tensors, dequantised, config, f"compressed-tensors {library.__version__}"
    return quantise


def scales_of(weight, args):
    """The smallest and largest of what shares a scale, by the library's formula."""
    from compressed_tensors.quantization.utils import calculate_qparams

    rows, columns = weight.shape
    blocks = dict(tensor=lambda: weight.reshape(1, 1, -1), channel=lambda: weight.reshape(rows, 1, columns),
                  group=lambda: weight.reshape(rows, columns // args.group_size, args.group_size),
                  block=lambda: blocks_of(weight, args.block_structure))[args.strategy]()
    scales, zero_points = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
    if args.strategy == "tensor":
        return scales.reshape(1), zero_points.reshape(1)
    return scales, zero_points


def blocks_of(weight, block):
    """Blocks, the last ones filled up with zeros, which change no largest magnitude."""
    (rows, columns), (height, width) = weight.shape, block
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)
    return blocks.transpose(1, 2).flatten(2)


def awq(group_size, left_alone=()):
    """By AutoAWQ's packing and unpacking, with its quantiser's formula for scales and zero points."""
    def quantise(weights):
        from awq.modules.linear.gemm import WQLinear_GEMM
        from awq.utils.packing_utils import dequantize_gemm

        tensors, dequantised = {}, {}
        for module, weight in weights.items():
            if any(module.endswith(name) for name in left_alone):
                continue
            scales, zeros = unsigned_scales(weight, 4, group_size)
            linear, size = linear_of(weight), group_size if group_size > 0 else weight.shape[1]
            made = WQLinear_GEMM.from_linear(linear, 4, size, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
            parts = dict(qweight=made.qweight, qzeros=made.qzeros, scales=made.scales)
            dequantised[module] = dequantize_gemm(**parts, bits=4, group_size=size).t().contiguous()
            tensors |= {f"{module}.{name}": tensor for name, tensor in parts.items()}
        config = dict(quant_method="awq", bits=4, group_size=group_size, zero_point=True, version="gemm",
                      modules_to_not_convert=list(left_alone) or None)
        return tensors, dequantised, config, "autoawq 0.2.9"
    return quantise


def gptq(bits, group_size, sym, desc_act=False, checkpoint_format="gptq"):
    """By GPTQModel's packing, conversion of zero points and unpacking; scales by minimum and maximum."""
    def quantise(weights):
        import_gptqmodel()
        from gptqmodel import __version__ as version
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear
        from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

        tensors, dequantised = {}, {}
        for module, weight in weights.items():
            columns = weight.shape[1]
            size = group_size if group_size > 0 else columns
            groups = torch.arange(columns) // size
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns)) if desc_act else groups.argsort()
            g_idx = torch.empty(columns, dtype=torch.int32)
            g_idx[order] = groups.to(torch.int32)
            scales, zeros = unsigned_scales(weight[:, order], bits, group_size, sym)
            made = TorchLinear(bits=bits, group_size=group_size, sym=sym, desc_act=desc_act, in_features=columns,
                               out_features=weight.shape[0], bias=False, pack_dtype=torch.int32, register_buffers=True)
            # What is packed is float32, as when the library quantises; its scales become float16.
            made.pack_original(linear_of(weight.float()), scales.half().float(), zeros.float(), g_idx)
            if checkpoint_format == "gptq":
                convert_gptq_v2_to_v1_format_module(made, made)
            parts = {name: getattr(made, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
            if checkpoint_format == "gptq":
                convert_gptq_v1_to_v2_format_module(made, bits, torch.int32)
            made.post_init()
            dequantised[module] = made.dequantize_weight().t().contiguous()
            tensors |= {f"{module}.{name}": tensor for name, tensor in parts.items()}
        config = dict(quant_method="gptq", bits=bits, group_size=group_size, sym=sym, desc_act=desc_act, lm_head=False,
                      checkpoint_format=checkpoint_format, pack_dtype="int32")
        return tensors, dequantised, config, f"gptqmodel {version}"
    return quantise


def bitsandbytes(kind, nested, left_alone=("lm_head",)):
    """By bitsandbytes on the CPU, which reads back only rows of whole blocks of 64."""
    def quantise(weights):
        import bitsandbytes as library
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        tensors, dequantised = {}, {}
        for module, weight in weights.items():
            if any(module.endswith(name) for name in left_alone):
                continue
            codes, state = quantize_4bit(weight.detach(), blocksize=64, compress_statistics=nested, quant_type=kind)
            dequantised[module] = dequantize_4bit(codes, state)
            tensors[f"{module}.weight"] = codes
            tensors |= {f"{module}.weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        config = dict(quant_method="bitsandbytes", load_in_4bit=True, load_in_8bit=False, bnb_4bit_quant_type=kind,
                      bnb_4bit_use_double_quant=nested, bnb_4bit_quant_storage="uint8", bnb_4bit_compute_dtype="float16",
                      llm_int8_skip_modules=list(left_alone), llm_int8_threshold=6.0)
        return tensors, dequantised, config, f"bitsandbytes {library.__version__}"
    return quantise


def import_gptqmodel():
    """GPTQModel without packages that its packing does not use and that are not to be had everywhere."""
    import importlib.abc
    import importlib.machinery
    import importlib.util
    import re
    import sys
    import types

    absent = [name for name in ("pcre", "torchao") if importlib.util.find_spec(name) is None]

    class Absent(types.ModuleType):
        __path__ = []

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            if name == "Flag":
                return types.SimpleNamespace(CASELESS=re.I, MULTILINE=re.M, DOTALL=re.S)
            return getattr(re, name, None) or type(name, (), {"__getattr__": lambda *_: None})

    class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path, target=None):
            return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in absent else None

        def create_module(self, spec):
            return Absent(spec.name)

        def exec_module(self, module):
            pass

    sys.meta_path.insert(0, Finder())
    import gptqmodel  # noqa: F401


def linear_of(weight):
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    linear.weight.data = weight
    return linear


def unsigned_scales(weight, bits, group_size, sym=False):
    """Scales and zero points of codes without a sign, outputs x groups, as the quantisers of AWQ and GPTQ choose them."""
    groups = weight.reshape(weight.shape[0], -1, group_size if group_size > 0 else weight.shape[1]).float()
    largest = 2**bits - 1
    if sym:
        scales = 2 * groups.abs().amax(-1).clamp(min=1e-5) / largest
        return scales.to(weight.dtype), torch.full_like(scales, (largest + 1) / 2)
    scales = ((groups.amax(-1) - groups.amin(-1)).clamp(min=1e-5) / largest).to(weight.dtype)
    return scales, (-torch.round(groups.amin(-1) / scales.float())).clamp(0, largest)


FP8 = dict(num_bits=8, type="float", symmetric=True)
INT8 = dict(num_bits=8, type="int", symmetric=True, strategy="channel")
INT4 = dict(num_bits=4, type="int", symmetric=True)
MXFP4 = dict(num_bits=4, type="float", symmetric=True, strategy="group", group_size=32, scale_dtype=torch.uint8)
PER_TOKEN = dict(num_bits=8, type="float", symmetric=True, strategy="token", dynamic=True)

# Each is there for what it has that the others have not: name, number format of the rest, who quantises.
CHECKPOINTS = {
    "fp8-block": ("F32", transformers_fp8((32, 16), ["lm_head", "model.layers.1.mlp.down_proj"])),
    "fp8-block-bf16": ("Bf16", transformers_fp8((16, 32), ["lm_head"])),
    "fp8-block-ue8m0": ("F32", transformers_fp8((32, 32), ["lm_head"], scale_fmt="ue8m0")),
    "fp8-block-128": ("Bf16", transformers_fp8((128, 128), ["lm_head"])),
    "fp8-tensor": ("F32", transformers_fp8(None, ["lm_head"])),
    "fp8-tensor-static": ("F16", auto_fp8()),
    "fbgemm-fp8": ("F32", fbgemm()),
    "ct-fp8-channel": ("Bf16", compressed_tensors(dict(FP8, strategy="channel"), PER_TOKEN)),
    "ct-fp8-tensor": ("F32", compressed_tensors(dict(FP8, strategy="tensor"), dict(FP8, strategy="tensor"))),
    "ct-fp8-block": ("F32", compressed_tensors(dict(FP8, strategy="block", block_structure=[48, 64]), PER_TOKEN,
                                               targets=["re:.*self_attn.*", "re:.*mlp.*"], ignore=[])),
    "ct-int8": ("Bf16", compressed_tensors(INT8, dict(INT8, strategy="token", dynamic=True))),
    "ct-int8-asym": ("F32", compressed_tensors(dict(INT8, symmetric=False, strategy="tensor"), dict(INT8, strategy="tensor"))),
    "ct-w4a16": ("F16", compressed_tensors(dict(INT4, strategy="group", group_size=32))),
    "ct-w4a16-asym": ("Bf16", compressed_tensors(dict(INT4, strategy="group", group_size=16, symmetric=False),
                                                 ignore=["lm_head", "re:.*layers.1.mlp.*"])),
    "ct-w4a16-channel": ("F32", compressed_tensors(dict(INT4, strategy="channel", symmetric=False))),
    "ct-mixed": ("F16", mixture([(["re:.*self_attn.*"], dict(FP8, strategy="channel"), PER_TOKEN),
                                 (["re:.*mlp.*"], dict(INT4, strategy="group", group_size=32), None)],
                                ["lm_head", "re:.*layers.1.mlp.down_proj"])),
    "ct-mxfp4": ("Bf16", compressed_tensors(MXFP4, dict(MXFP4, dynamic=True))),
    "ct-w8a16": ("F32", compressed_tensors(dict(INT4, num_bits=8, strategy="group", group_size=32, symmetric=False))),
    "awq-g32": ("F16", awq(32)),
    "awq-channel": ("F16", awq(-1, ["self_attn.o_proj"])),
    "gptq-g32": ("F16", gptq(4, 32, sym=True)),
    "gptq-act-order": ("F16", gptq(4, 16, sym=True, desc_act=True)),
    "gptq-asym": ("F16", gptq(4, 32, sym=False)),
    "gptq-v2-asym": ("F16", gptq(4, -1, sym=False, desc_act=True, checkpoint_format="gptq_v2")),
    "gptq-8": ("F16", gptq(8, 32, sym=False)),
    "nf4": ("F32", bitsandbytes("nf4", nested=False)),
    "nf4-nested": ("F16", bitsandbytes("nf4", nested=True, left_alone=["lm_head", "k_proj"])),
    "fp4-nested": ("Bf16", bitsandbytes("fp4", nested=True)),
}
# Rows of whole blocks.
WIDER = dict(intermediate_size=128)
# Blocks as they are published: transformers make no parts of them.
BLOCKS = dict(hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=8)
SETTINGS = {"nf4": WIDER, "nf4-nested": WIDER, "fp4-nested": WIDER, "fp8-block-128": BLOCKS}


def stored_as(model, dtype):
    """Weights in another format. Angles stay in float32, as in a model that is loaded."""
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


def projections_of(model):
    """Weights that are multiplied with, but for the output matrix."""
    linear = lambda module: isinstance(module, torch.nn.Linear)
    return {name: module.weight for name, module in model.named_modules() if linear(module) and name != "lm_head"}


def by_formula(config, tensors, module, shape):
    """(code - zero point) * scale in float64 with numpy, from the tensors as they are written: a second reading."""
    part = lambda name: tensors.get(f"{module}.{name}")
    float64 = lambda tensor: tensor.to(torch.float32).double().numpy()
    rows, columns = shape
    if config["quant_method"] in ("awq", "gptq"):
        bits = config["bits"]
        def codes(words):
            words = words.numpy().view(numpy.uint32)
            return numpy.stack([words >> (bits * place) & (2**bits - 1) for place in range(32 // bits)], -1)
        scales = float64(part("scales"))
        group = numpy.arange(columns) // (config["group_size"] if config["group_size"] > 0 else columns)
        qzeros = part("qzeros")
        if config["quant_method"] == "awq":
            order = numpy.argsort([0, 2, 4, 6, 1, 3, 5, 7])
            quants, zeros = (codes(words)[..., order].reshape(len(words), -1) for words in (part("qweight"), qzeros))
        else:
            group = part("g_idx").numpy()
            if config["checkpoint_format"] == "gptq":
                qzeros = (qzeros.to(torch.int64) + {4: 0x11111111, 8: 0x01010101}[bits]).to(torch.int32)
            quants = codes(part("qweight")).transpose(0, 2, 1).reshape(columns, -1)
            zeros = codes(qzeros).reshape(len(qzeros), -1)
        return ((quants - zeros[group].astype(numpy.float64)) * scales[group]).T
    if config["quant_method"] == "bitsandbytes":
        quants = part("weight").numpy().reshape(-1)
        levels = float64(part("weight.quant_map"))[numpy.stack([quants >> 4, quants & 15], -1).reshape(-1)]
        scales = part("weight.absmax")
        if scales.dtype == torch.uint8:
            state = [value for name, value in tensors.items() if name.startswith(f"{module}.weight.quant_state")][0]
            offset = numpy.float32(json.loads(bytes(state.tolist()))["nested_offset"])
            outer = float64(part("weight.nested_absmax")).repeat(256)[:scales.numel()]
            # The library rounds each of these to float32.
            scales = (float64(part("weight.nested_quant_map"))[scales.numpy()] * outer).astype(numpy.float32) + offset
        return (levels.reshape(-1, 64) * numpy.asarray(scales, dtype=numpy.float64).reshape(-1, 1)).reshape(shape)
    scale = part("weight_scale") if part("weight_scale") is not None else part("weight_scale_inv")
    grid = float64(scale)
    grid = grid.reshape(1, 1) if grid.size == 1 else grid
    block = {1: rows}.get(grid.shape[0], None), {1: columns}.get(grid.shape[1], None)
    weights = weights_of(config, module)
    given = config.get("weight_block_size") or weights.get("block_structure") or (1, weights.get("group_size"))
    index = [numpy.arange(size) // (whole or by) for size, whole, by in zip(shape, block, given)]
    zeros = part("weight_zero_point")
    if weights.get("type") == "float" and weights["num_bits"] == 4:
        packed, magnitudes = part("weight_packed").numpy(), [0, .5, 1, 1.5, 2, 3, 4, 6]
        levels = numpy.array(magnitudes + [-magnitude for magnitude in magnitudes])
        quants = levels[numpy.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)]
        grid = numpy.exp2(scale.numpy().astype(numpy.float64) - 127)
    elif part("weight_packed") is not None:
        bits = weights["num_bits"]
        def signed(words):
            words = words.numpy().view(numpy.uint32)
            places = numpy.stack([words >> (bits * place) & (2**bits - 1) for place in range(32 // bits)], -1)
            return places.reshape(len(words), -1).astype(numpy.float64) - 2**(bits - 1)
        quants = signed(part("weight_packed"))[:, :columns]
        zeros = None if zeros is None else signed(zeros.t().contiguous()).T[:rows]
    else:
        quants = float64(part("weight"))
        zeros = None if zeros is None else float64(zeros).reshape(grid.shape)
    pick = lambda values: values[numpy.ix_(*index)]
    return (quants - (0 if zeros is None else pick(zeros))) * pick(grid)


def weights_of(config, module):
    """What compressed-tensors says of the weights of a module."""
    import re

    groups = list(config.get("config_groups", {}).values())
    meant = [group for group in groups if any(re.match(name.removeprefix("re:"), module) for name in group["targets"])]
    return next(iter(meant or groups), {}).get("weights", {})


def plain_tensors(state, quantised):
    """What is not quantised, as the formula gives it."""
    tensors, digest = [], hashlib.sha256()
    for name in sorted(state):
        if name.removesuffix(".weight") in quantised:
            continue
        values = family.values_of(name, tuple(state[name].shape), family.base_of(name, "llama"))
        digest.update(values.view(torch.int16).numpy().tobytes())
        tensors.append([name, list(values.shape), family.base_of(name, "llama")])
    return tensors, digest.hexdigest()


def in_8_bits(x):
    """Each 32 numbers as integers of one scale."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return (torch.round(blocks / scale.clamp_min(1e-30)) * scale).reshape(x.shape)


def noise_floor_8_bits(model, quantised, tokens, exact):
    """How far the rows move when what enters quantised matrices is rounded to blocks of 8 bits."""
    for module in quantised:
        model.get_submodule(module).register_forward_pre_hook(lambda _, inputs: (in_8_bits(inputs[0]),))
    return family.noise_floor(exact, family.logits_of(model, tokens))


def sha256(tensor):
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def make(name):
    stored, quantise = CHECKPOINTS[name]
    config = family.config_of("llama", SETTINGS.get(name, {}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        family.fill(model, "llama")
        stored_as(model, DTYPES[stored])
        tensors, dequantised, quantization_config, made_by = quantise(projections_of(model))
        for module, values in dequantised.items():
            formula = torch.from_numpy(by_formula(quantization_config, tensors, module, values.shape))
            assert values.dtype == DTYPES[stored] and torch.equal(formula.to(values.dtype), values), (name, module)
            model.get_submodule(module).weight.copy_(values)
    plain, digest = plain_tensors(model.state_dict(), dequantised)
    tokens = torch.randint(0, family.VOCAB, (family.N_TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()
    golden = dict(made_by=f"{made_by}; transformers {__version__}, torch {torch.__version__.split('+')[0]}", stored=stored,
                  weights_sha256=digest, tensors=plain,
                  dequantised=[[module, sha256(values)] for module, values in sorted(dequantised.items())])
    exact_model = stored_as(copy.deepcopy(model), torch.float32)
    exact = family.logits_of(exact_model, tokens)
    golden |= dict(tokens=tokens, ids=family.IDS, rows=family.rows_of(exact),
                   greedy=family.greedy(exact_model, tokens[:family.N_SHORT]))
    if stored == "Bf16":
        rounded = family.logits_of(model, tokens)
        golden |= dict(rows_bf16=family.rows_of(rounded), noise_floor=family.noise_floor(exact, rounded))
    integers = {name.rpartition(".")[0] for name, tensor in tensors.items() if tensor.dtype in (torch.int32, torch.int8)}
    if integers:
        golden["noise_floor_8_bits"] = noise_floor_8_bits(exact_model, integers & dequantised.keys(), tokens, exact)
    directory = GOLDENS / name
    directory.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(model).__name__]
    config.dtype = DTYPES[stored]
    text = config.to_diff_dict() | dict(quantization_config=quantization_config)
    (directory / "config.json").write_text(json.dumps(text, indent=1, sort_keys=True, default=str) + "\n")
    (directory / "golden.json").write_text(family.dump(golden))
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, directory / "quantised.safetensors")
    print(f"{name}: {made_by}, {len(dequantised)} projections, "
          f"{(directory / 'quantised.safetensors').stat().st_size} bytes, largest logit {exact.abs().max():.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CHECKPOINTS)}; all without")
    torch.set_num_threads(2)
    for name in parser.parse_args().names or CHECKPOINTS:
        make(name)


if __name__ == "__main__":
    main()
