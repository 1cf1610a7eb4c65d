#!/usr/bin/env python3
"""Writes the goldens that a GPU is held to: tiny models of every family with heads that its kernels take, and long prompts.

    python3 -m venv VENV && VENV/bin/pip install torch==2.11.0 transformers==5.17.0 safetensors==0.8.0 tokenizers==0.23.3
    VENV/bin/python tests/tools/make_gpu_goldens.py [--device cuda] [NAME ...]

tests/goldens/gpu-families/NAME/config.json is what transformers saves; golden.json beside it has
- `tensors`, `weights_sha256`: as in make_family_goldens.py, from which the weights' formula is, with a factor on the numbers as the
  fourth entry: matrices four times as wide as there need half the size, else rounding to bf16 decides everything;
- `n_tokens`: of the input; token i is z % vocabulary of the same generator with the name "tokens";
- `ids`, `rows`: at some positions, logits of some token ids in float32;
- `noise`: for each of these rows, the largest difference of the same logits in bfloat16 relative to the largest of them;
- `greedy`: 64 greedy tokens after `n_prompt` of the input, in float32, and `margins`: by how much of the row's largest logit each
  is above the next best.
"""

import argparse
import hashlib
import json

import torch
from make_family_goldens import ALWAYS_TIED, DEFAULTS, GOLDENS as FAMILIES, LLAMA3, YARN, base_of, dump, fnv1a64, values_of
from transformers import AutoConfig, AutoModelForCausalLM, __version__

GOLDENS = FAMILIES.parent / "gpu-families"
VOCAB = DEFAULTS["vocab_size"]
N_PROMPT, N_GREEDY = 333, 64
IDS = list(range(3, VOCAB, 17))
# The ends of prompts of 1, 17, 333 and 5000 tokens, rows across block and window borders, and others in between.
FIRST = [0, 1, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 199, 200, 201, 255, 256, 257, 299, 300, 301, 332, 333, 399]

LONGROPE = dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=512, partial_rotary_factor=0.75,
                short_factor=[1.0 + 0.01 * i for i in range(48)], long_factor=[1.0 + 0.3 * i for i in range(48)])
GEMMA = dict(head_dim=256, query_pre_attn_scalar=200, num_attention_heads=4, num_key_value_heads=2, hidden_activation="gelu_pytorch_tanh")

MODELS = {
    "llama-heads-of-80": ("llama", dict(head_dim=80, rope_parameters=LLAMA3)),
    "llama-biases-everywhere": ("llama", dict(head_dim=64, attention_bias=True, mlp_bias=True)),
    "mistral-window": ("mistral", dict(head_dim=128, sliding_window=200)),
    "qwen2-windows-yarn": ("qwen2", dict(use_sliding_window=True, sliding_window=300, max_window_layers=1,
                                         rope_parameters=YARN, tie_word_embeddings=True)),
    "qwen3": ("qwen3", dict(head_dim=128)),
    "smollm3": ("smollm3", dict(num_hidden_layers=4)),
    "olmo2": ("olmo2", dict(num_key_value_heads=2)),
    "phi3-heads-of-96": ("phi3", dict(hidden_size=384, num_key_value_heads=4, sliding_window=300)),
    "phi4-longrope": ("phi3", dict(hidden_size=512, rope_parameters=LONGROPE, original_max_position_embeddings=512)),
    "gemma2": ("gemma2", dict(GEMMA, sliding_window=256, attn_logit_softcapping=5.0, final_logit_softcapping=8.0)),
    "gemma3": ("gemma3_text", dict(GEMMA, sliding_window=128, num_hidden_layers=7, rope_parameters=dict(
        full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
        sliding_attention=dict(rope_type="default", rope_theta=10000.0)))),
}
SIZES = dict(hidden_size=256, intermediate_size=384, max_position_embeddings=8192)
N_TOKENS = 5000


def matrix_factor(config):
    """With it rounding to bf16 moves logits by some percent of the largest."""
    return 0.5 if config.hidden_size <= 256 else 0.25


def tokens_of(n):
    mask, tokens = 2**64 - 1, []
    for index in range(n):
        z = (fnv1a64("tokens") + index * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        tokens.append((z ^ (z >> 31)) % VOCAB)
    return tokens


def config_of(model_type, settings):
    tied = dict(tie_word_embeddings=True) if model_type in ALWAYS_TIED else {}
    return AutoConfig.for_model(model_type, **{**DEFAULTS, **SIZES, **tied, **settings})


def fill(model, model_type):
    """Sets every weight by the formula; returns the description of the tensors. Factors are powers of two: exact in bf16."""
    tensors, digest, state = [], hashlib.sha256(), model.state_dict()
    for name in sorted(state):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        base, factor = base_of(name, model_type), 1.0 if "norm" in name else matrix_factor(model.config)
        values = values_of(name, tuple(state[name].shape), base) * factor
        digest.update(values.view(torch.int16).numpy().tobytes())
        state[name].copy_(values)
        tensors.append([name, list(state[name].shape), base, factor])
    return tensors, digest.hexdigest()


def logits_of(model, tokens, positions):
    """Only the rows that are asked for go through the head."""
    with torch.no_grad():
        out = model(torch.tensor([tokens], device=model.device), use_cache=False,
                    logits_to_keep=torch.tensor(positions, device=model.device))
    return out.logits[0].to(torch.float32).cpu()


def greedy(model, prompt):
    """With transformers' own cache. Keys that a rotary scaling by length has turned stay as they are, as long as it does not switch."""
    tokens, margins, step, cache = [], [], torch.tensor([prompt], device=model.device), None
    with torch.no_grad():
        for _ in range(N_GREEDY):
            out = model(step, use_cache=True, past_key_values=cache, logits_to_keep=1)
            row, cache = out.logits[0, -1].to(torch.float32), out.past_key_values
            best = row.topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(f"{float((best.values[0] - best.values[1]) / row.abs().max()):.3g}"))
            step = torch.tensor([[tokens[-1]]], device=model.device)
    return tokens, margins


def rows_of(model, tokens, positions):
    return logits_of(model, tokens, positions)[:, IDS]


def make(name, device):
    model_type, settings = MODELS[name]
    config = config_of(model_type, settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        tensors, digest = fill(model, model_type)
    model = model.to(device)
    tokens = tokens_of(N_TOKENS)
    positions = sorted({*FIRST, *range(417, N_TOKENS, 53), N_TOKENS - 1})
    exact = rows_of(model, tokens, positions)
    chosen, margins = greedy(model, tokens[:N_PROMPT])
    rounded = rows_of(model.to(torch.bfloat16), tokens, positions)
    noise = (rounded - exact).abs().amax(1) / exact.abs().amax(1)
    rows = [dict(position=at, logits=[float(f"{value:.6g}") for value in row]) for at, row in zip(positions, exact.tolist())]
    golden = dict(made_by=f"transformers {__version__}, torch {torch.__version__.split('+')[0]}", weights_sha256=digest,
                  tensors=tensors, n_tokens=N_TOKENS, n_prompt=N_PROMPT, ids=IDS, rows=rows,
                  noise=[float(f"{value:.3g}") for value in noise.tolist()], greedy=chosen, margins=margins)
    directory = GOLDENS / name
    directory.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(model).__name__]
    (directory / "golden.json").write_text(dump(golden))
    (directory / "config.json").write_text(json.dumps(config.to_diff_dict(), indent=1, sort_keys=True) + "\n")
    print(f"{name}: {config.architectures[0]}, noise mean {noise.mean():.2e}, worst {noise.max():.2e}, "
          f"{len(set(chosen))} different greedy tokens, largest logit {exact.abs().max():.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}; all without")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    for name in arguments.names or MODELS:
        make(name, arguments.device)


if __name__ == "__main__":
    main()
