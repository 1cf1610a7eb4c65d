#!/usr/bin/env python3
"""Four bits by llm-compressor, for a comparison with `stoker-quantize` on the same model and text: W4A16 with a scale for each 128 inputs.

    VENV/bin/pip install --no-deps llmcompressor==0.14.0.1 auto-round && VENV/bin/pip install datasets nvidia-ml-py pyyaml
    VENV/bin/python tests/tools/quantise_with_llmcompressor.py MODEL TEXT.jsonl nearest|gptq|awq OUT [--sequence 256]

with the environment of `compare_quantised.py`, which then says what the result loses.
"""

import argparse
import json

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmcompressor import oneshot
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier

METHODS = dict(nearest=QuantizationModifier, gptq=GPTQModifier, awq=AWQModifier)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("out")
    parser.add_argument("--sequence", type=int, default=256)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        # AWQ pins what it keeps, for copies to a GPU; without a driver that is an error.
        torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [json.loads(line)["text"] for line in open(args.text) if line.strip()]
    rows = [tokenizer(text, max_length=args.sequence, truncation=True) for text in texts]
    rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in rows]
    oneshot(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        dataset=Dataset.from_list(rows),
        recipe=METHODS[args.method](targets=["Linear"], scheme="W4A16", ignore=["lm_head"]),
        max_seq_length=args.sequence,
        num_calibration_samples=len(rows),
        output_dir=args.out,
        tokenizer=tokenizer,
    )


if __name__ == "__main__":
    main()
