"""Trains the byte-level BPE tokenizer on the corpus and writes it as Hugging Face files.

usage: python tokenizer.py OUT_DIR [--vocab 4096] [--samples 60000]

Digits are single tokens (a sum is worked out digit by digit), everything else is GPT-2's split over bytes, so any text
has tokens. Deterministic: the same samples give the same file.
"""

import argparse
import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

import render
from corpus import essays, mix
from corpus.sample import rng_for


def corpus_texts(n_samples):
    """Texts of training samples, every task equally often, without special tokens."""
    tasks = list(mix.SHARES)
    for i in range(n_samples):
        rng = rng_for("tokenizer", i)
        # Long lists are made of the same pieces as short ones; they would only drown the other tasks.
        task = tasks[i % len(tasks)].replace("lookup_long", "lookup")
        sample = mix.train_sample(rng, task)
        yield from (json.dumps(tool["function"]) for tool in sample.tools or ())
        for message in sample.messages:
            yield render.said(message).replace(render.CALL, "").replace(render.CALL_END, "")
        if i % 50 == 0:
            yield essays.document(rng)


def train(vocab_size, n_samples):
    """The tokenizer with its special tokens and a post-processor that begins each text with BEGIN."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in render.SPECIAL]
    marks = [AddedToken(text, special=False, normalized=False) for text in render.MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(marks),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus_texts(n_samples), trainer)
    tokenizer.add_tokens(marks)
    begin = (render.BEGIN, tokenizer.token_to_id(render.BEGIN))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{render.BEGIN} $A", pair=f"{render.BEGIN} $A $B", special_tokens=[begin]
    )
    return tokenizer


def write(tokenizer, directory):
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (Path(__file__).parent / "chat_template.jinja").read_text().rstrip("\n")
    (directory / "chat_template.jinja").write_text(template)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": render.BEGIN,
        "eos_token": render.END,
        "pad_token": render.PAD,
        "additional_special_tokens": list(render.ROLES.values()),
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": template,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=60000)
    args = parser.parse_args()
    tokenizer = train(args.vocab, args.samples)
    write(tokenizer, args.out)
    print(f"{tokenizer.get_vocab_size()} tokens -> {args.out}")


if __name__ == "__main__":
    main()
