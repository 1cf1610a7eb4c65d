#!/usr/bin/env python3
"""Writes tests/goldens/specs/defaults.json: what transformers assumes for fields that a config.json leaves out.

    python3 -m venv VENV && VENV/bin/pip install transformers==5.23.0
    VENV/bin/python tests/tools/make_config_goldens.py

Each case has `config`, the fields of a config.json, and what transformers' own configuration class makes of it: heads, the
factor on scores, windows layer by layer (null: all), soft-caps, bases of the rotary angles (of windowed layers too, where
they have their own), whether the output matrix is tied, the norms' eps, the activation.
"""

import json
import pathlib

from transformers import AutoConfig, __version__

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "goldens" / "specs" / "defaults.json"
SIZES = dict(hidden_size=2048, intermediate_size=512, num_hidden_layers=30, num_attention_heads=32, vocab_size=2048,
             max_position_embeddings=8192)
TYPES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
         "Qwen3ForCausalLM": "qwen3", "SmolLM3ForCausalLM": "smollm3", "Olmo2ForCausalLM": "olmo2",
         "Phi3ForCausalLM": "phi3", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3_text"}
# Fields that are there, beside the sizes.
MORE = [("MistralForCausalLM", dict(sliding_window=None)),
        ("Qwen2ForCausalLM", dict(use_sliding_window=True)),
        ("Qwen3ForCausalLM", dict(use_sliding_window=False, sliding_window=64,
                                  layer_types=["sliding_attention"] * 30)),
        ("Gemma2ForCausalLM", dict(attn_logit_softcapping=None, final_logit_softcapping=None)),
        ("Gemma3ForCausalLM", dict(sliding_window_pattern=4, rope_local_base_freq=5000.0))]


def windows(config):
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    if config.model_type in ("llama", "olmo2"):
        return [None] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def expected(config):
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dict(head_dim=head_dim, num_key_value_heads=config.num_key_value_heads,
                scale=getattr(config, "query_pre_attn_scalar", head_dim) ** -0.5, windows=windows(config),
                attention_softcap=getattr(config, "attn_logit_softcapping", None),
                logit_softcap=getattr(config, "final_logit_softcapping", None),
                thetas=[full["rope_theta"]] + [rope[kind]["rope_theta"] for kind in rope if kind == "sliding_attention"],
                tied=config.tie_word_embeddings, eps=config.rms_norm_eps,
                activation=getattr(config, "hidden_activation", None) or config.hidden_act)


def case(architecture, fields):
    config = AutoConfig.for_model(TYPES[architecture], **SIZES, **fields)
    return dict(config=dict(architectures=[architecture], **SIZES, **fields), expected=expected(config))


if __name__ == "__main__":
    cases = [case(architecture, {}) for architecture in TYPES] + [case(*more) for more in MORE]
    lines = ",\n".join(json.dumps(one) for one in cases)
    GOLDEN.write_text(f'{{"transformers": "{__version__}", "cases": [\n{lines}\n]}}\n')
