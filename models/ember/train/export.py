"""Writes a trained model as a Hugging Face directory: config, generation config and bf16 weights beside the tokenizer."""

import json

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

import render


def config(shape, tokenizer):
    """config.json of a LlamaForCausalLM."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **shape.asdict(),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": tokenizer.token_to_id(render.BEGIN),
        "eos_token_id": tokenizer.token_to_id(render.END),
        "pad_token_id": tokenizer.token_to_id(render.PAD),
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def generation_config(tokenizer):
    """Chat ends with END, plain text with TEXT_END. A low temperature: most answers have one right wording."""
    ids = {
        name: tokenizer.token_to_id(token)
        for name, token in (("bos_token_id", render.BEGIN), ("pad_token_id", render.PAD))
    }
    return {
        **ids,
        "eos_token_id": [tokenizer.token_to_id(render.END), tokenizer.token_to_id(render.TEXT_END)],
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 0,
    }


def rounded(model):
    """The weights as they are stored."""
    return {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}


def write(model, shape, directory):
    """Everything but the tokenizer, which must be in `directory` already."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for name, content in (
        ("config.json", config(shape, tokenizer)),
        ("generation_config.json", generation_config(tokenizer)),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    save_file(rounded(model), directory / "model.safetensors", metadata={"format": "pt"})
