#!/usr/bin/env python3
"""Writes the goldens of model families: what Hugging Face transformers computes with tiny models of each architecture.

    python3 -m venv VENV && VENV/bin/pip install torch==2.11.0 transformers==5.23.0 safetensors==0.8.0 tokenizers==0.23.3
    VENV/bin/python tests/tools/make_family_goldens.py [NAME ...]

tests/goldens/families/NAME/config.json is what transformers saves; golden.json beside it has
- `tensors`: name, shape and base of every tensor. Weights are not stored, they follow from the tensor's name and base:
      z = splitmix64(fnv1a64(name) + index * 0x9E3779B97F4A7C15)        (64 bits, wrapping)
      value = base + 0.2 * (2 * (z >> 40) / 2^24 - 1)                   (in float32), rounded to bf16
  so that the same numbers can be stored as f32 or bf16 by whoever reads this;
- `weights_sha256`: of all tensors' bf16 bytes in the order of their names;
- `tokens`, `ids`, `rows`: at some positions of the input, logits of some token ids, the likeliest token and the
  logarithm of the sum of exponentials, in float32. Attention is causal: the row of position 16 is that of a prompt of
  17 tokens. `short` has the same for an input of 17 where that differs (rotary scalings that depend on the length);
- `greedy`: 64 greedy tokens after a prompt of 17, in float32;
- `rows_bf16`: the same computed in bfloat16, and `noise_floor`: the largest difference between the two relative to the
  row's largest logit.
"""

import argparse
import hashlib
import json
import pathlib

import numpy
import torch
from transformers import AutoConfig, AutoModelForCausalLM, __version__

GOLDENS = pathlib.Path(__file__).resolve().parent.parent / "goldens" / "families"
VOCAB = 272
N_TOKENS, N_SHORT, N_GREEDY = 333, 17, 64
# The ends of prompts of 1, 17 and 333 tokens, and rows across block and window borders.
POSITIONS = [0, 1, 15, 16, 23, 24, 25, 128, 300, 332]
IDS = list(range(0, VOCAB, 8))

LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
LONGROPE = dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=128,
                short_factor=[1.0, 1.05, 1.1, 1.2, 1.3, 1.4], long_factor=[1.0, 1.3, 2.0, 4.0, 8.0, 16.0])
GEMMA = dict(hidden_size=48, head_dim=16, query_pre_attn_scalar=24, sliding_window=24)

# Each is there for what it has that the others have not.
MODELS = {
    "llama2": ("llama", dict(num_key_value_heads=4)),
    "llama3": ("llama", dict(rope_parameters=LLAMA3)),
    "llama-linear": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0))),
    "llama-dynamic": ("llama", dict(rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0),
                                    max_position_embeddings=128)),
    "mistral": ("mistral", dict(sliding_window=24, head_dim=24)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2-windows-yarn": ("qwen2", dict(use_sliding_window=True, sliding_window=24, max_window_layers=1,
                                         rope_parameters=YARN)),
    "qwen3": ("qwen3", dict(head_dim=24)),
    "smollm3": ("smollm3", dict(num_hidden_layers=4)),
    "olmo2": ("olmo2", dict(num_key_value_heads=2)),
    "phi3": ("phi3", dict(sliding_window=24)),
    "phi4-longrope": ("phi3", dict(rope_parameters=dict(LONGROPE, partial_rotary_factor=0.75),
                                   original_max_position_embeddings=128)),
    "gemma2": ("gemma2", dict(GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=8.0)),
    "gemma3": ("gemma3_text", dict(GEMMA, num_hidden_layers=7, rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
        sliding_attention=dict(rope_type="default", rope_theta=10000.0)))),
}
DEFAULTS = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                vocab_size=VOCAB, max_position_embeddings=512, rms_norm_eps=1e-5, bos_token_id=256, eos_token_id=257,
                pad_token_id=None, tie_word_embeddings=False)
# Their output matrix is always the embedding table.
ALWAYS_TIED = {"gemma2", "gemma3_text", "smollm3"}


def fnv1a64(name):
    digest = 0xCBF29CE484222325
    for byte in name.encode():
        digest = (digest ^ byte) * 0x100000001B3 % 2**64
    return digest


def values_of(name, shape, base):
    with numpy.errstate(over="ignore"):
        indices = numpy.arange(numpy.prod(shape), dtype=numpy.uint64)
        z = numpy.uint64(fnv1a64(name)) + indices * numpy.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        z = z ^ (z >> numpy.uint64(31))
    unit = (z >> numpy.uint64(40)).astype(numpy.float32) / numpy.float32(2**24)
    values = numpy.float32(base) + numpy.float32(0.2) * (numpy.float32(2) * unit - numpy.float32(1))
    return torch.from_numpy(values.reshape(shape)).to(torch.bfloat16)


def base_of(name, model_type):
    """Norms scale by about one; Gemma stores what is added to one."""
    return 1.0 if "norm" in name and not model_type.startswith("gemma") else 0.0


def config_of(model_type, settings):
    tied = dict(tie_word_embeddings=True) if model_type in ALWAYS_TIED else {}
    return AutoConfig.for_model(model_type, **{**DEFAULTS, **tied, **settings})


def fill(model, model_type):
    """Sets every weight by the formula; returns the description of the tensors."""
    tensors, digest = [], hashlib.sha256()
    state = model.state_dict()
    for name in sorted(state):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        base = base_of(name, model_type)
        values = values_of(name, tuple(state[name].shape), base)
        digest.update(values.view(torch.int16).numpy().tobytes())
        state[name].copy_(values)
        tensors.append([name, list(state[name].shape), base])
    return tensors, digest.hexdigest()


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].to(torch.float32)


def rows_of(logits):
    return [dict(position=position, likeliest=int(logits[position].argmax()),
                 log_sum_exp=round(float(logits[position].double().logsumexp(0)), 6),
                 logits=[float(f"{value:.7g}") for value in logits[position, IDS].tolist()])
            for position in POSITIONS if position < len(logits)]


def noise_floor(exact, rounded):
    return float(((rounded - exact).abs().amax(1) / exact.abs().amax(1)).max())


def greedy(model, prompt):
    tokens = list(prompt)
    for _ in range(N_GREEDY):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens[len(prompt):]


def dump(golden):
    lines = []
    for key, value in golden.items():
        is_list = isinstance(value, list) and value and isinstance(value[0], (dict, list))
        text = "[\n  " + ",\n  ".join(json.dumps(row) for row in value) + "]" if is_list else json.dumps(value)
        lines.append(f'"{key}": {text}')
    return "{" + ",\n".join(lines) + "}\n"


def depends_on_length(config):
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type") in ("dynamic", "longrope")


def make(name):
    model_type, settings = MODELS[name]
    config = config_of(model_type, settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        tensors, digest = fill(model, model_type)
    tokens = torch.randint(0, VOCAB, (N_TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()
    exact = logits_of(model, tokens)
    golden = dict(made_by=f"transformers {__version__}, torch {torch.__version__.split('+')[0]}",
                  weights_sha256=digest, tensors=tensors, tokens=tokens, ids=IDS, rows=rows_of(exact))
    if depends_on_length(config):
        golden["short"] = rows_of(logits_of(model, tokens[:N_SHORT]))
    golden["greedy"] = greedy(model, tokens[:N_SHORT])
    directory = GOLDENS / name
    directory.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(model).__name__]
    rounded = logits_of(model.to(torch.bfloat16), tokens)
    golden.update(rows_bf16=rows_of(rounded), noise_floor=noise_floor(exact, rounded))
    (directory / "golden.json").write_text(dump(golden))
    (directory / "config.json").write_text(json.dumps(config.to_diff_dict(), indent=1, sort_keys=True) + "\n")
    print(f"{name}: {config.architectures[0]}, noise floor {golden['noise_floor']:.2e}, "
          f"{len(set(golden['greedy']))} different greedy tokens, largest logit {exact.abs().max():.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}; all without")
    torch.set_num_threads(2)
    for name in parser.parse_args().names or MODELS:
        make(name)


if __name__ == "__main__":
    main()
