#!/usr/bin/env python3
"""What quantising did to a model's answers, by Hugging Face transformers: the same figures as `stoker-quantize --evaluate`, from an
implementation that is not ours, of a directory that `stoker-quantize` made.

    python3 -m venv VENV && VENV/bin/pip install torch==2.11.0 transformers==5.23.0 safetensors==0.8.0 tokenizers==0.23.3 \\
        accelerate==1.15.0 compressed-tensors==0.20.0 loguru pydantic psutil
    VENV/bin/python tests/tools/compare_quantised.py ORIGINAL QUANTISED TEXT.jsonl [--sequence 256] [--samples 350]

All is computed in float32; numbers of the checkpoints are what they are. What enters projections is rounded as the checkpoint says, which
our engine's CPU does for integers only, in blocks of 32.
"""

import argparse
import json
import math

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def sequences(path, tokenizer, length, most):
    found = []
    for line in open(path):
        if line.strip():
            tokens = tokenizer(json.loads(line)["text"], return_tensors="pt").input_ids[0]
            found += [part for part in tokens.split(length) if len(part) > 1]
    return found[:most]


def log_probabilities(model, tokens):
    return torch.log_softmax(model(tokens[None]).logits[0].double(), dim=-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original")
    parser.add_argument("quantised")
    parser.add_argument("text")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--samples", type=int, default=350)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.original)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (args.original, args.quantised)]
    count, surprises, divergence, agreed = 0, [0.0, 0.0], 0.0, 0
    with torch.inference_mode():
        for tokens in sequences(args.text, tokenizer, args.sequence, args.samples):
            before, after = (log_probabilities(model, tokens)[:-1] for model in models)
            following = tokens[1:, None]
            count += len(following)
            surprises = [sum_ - rows.gather(1, following).sum().item() for sum_, rows in zip(surprises, (before, after))]
            divergence += (before.exp() * (before - after)).sum().item()
            agreed += (before.argmax(-1) == after.argmax(-1)).sum().item()
    before, after = (math.exp(surprise / count) for surprise in surprises)
    print(f"perplexity {before:.4f} -> {after:.4f} on {count} tokens")
    print(f"divergence {divergence / count:.5f} nats a token, the same likeliest token {100 * agreed / count:.2f} %")


if __name__ == "__main__":
    main()
