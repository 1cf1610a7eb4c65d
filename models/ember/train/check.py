"""Holds the training code equal to what a server runs: the chat template to `render`, `model` to transformers.

usage: python check.py MODEL_DIR   (a directory written by train.py; prints one line a check, fails on a difference)
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import data
import render
from corpus import mix
from model import Llama, Shape, dense_mask

# float32 sums in another order; logits are of the order of 10.
LOGIT_TOLERANCE = 2e-3


def samples(n=20):
    return [sample for task in mix.TESTED for sample in data.test_samples(task, n, "check")]


def template_equals_renderer(directory):
    """The same text and the same tokens, with and without tools."""
    hugging_face, plain = (
        AutoTokenizer.from_pretrained(directory),
        Tokenizer.from_file(str(directory / "tokenizer.json")),
    )
    checked = samples()
    for sample in checked:
        text = "".join(piece for piece, _ in render.pieces(sample.messages, sample.tools))
        rendered = hugging_face.apply_chat_template(sample.messages, tools=sample.tools, tokenize=False)
        assert rendered == text, f"{rendered!r}\n{text!r}"
        ((ids, _),) = data.tokenized(plain, [list(render.pieces(sample.messages, sample.tools))])
        assert hugging_face(text, add_special_tokens=False).input_ids == ids, text
    return f"{len(checked)} conversations"


def model_equals_transformers(directory):
    """The same logits for the stored weights in float32."""
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    shape = Shape(
        **{
            field: getattr(theirs.config, field)
            for field in (
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "vocab_size",
                "head_dim",
            )
        }
    )
    ours = Llama(shape)
    ours.load_state_dict({name: weight.float() for name, weight in load_file(directory / "model.safetensors").items()})
    ids = torch.randint(16, shape.vocab_size, (2, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (theirs(ids).logits - ours(ids, dense_mask(torch.ones_like(ids)))).abs().max().item()
    assert difference < LOGIT_TOLERANCE, difference
    return f"largest difference of a logit {difference:.1e}"


def main():
    directory = Path(sys.argv[1])
    for check in (template_equals_renderer, model_equals_transformers):
        print(f"ok {check.__name__}: {check(directory)}")


if __name__ == "__main__":
    main()
