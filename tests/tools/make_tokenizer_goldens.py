#!/usr/bin/env python3
"""Writes the goldens of tokenizers: what transformers makes of 10 000 random strings, and back.

    VENV/bin/python tests/tools/make_tokenizer_goldens.py [--added]     # VENV as for make_engine_goldens.py

tests/goldens/tokenizers has two tokenizers trained here on this repository's documentation, one byte-level and one in
SentencePiece's manner, and golden.json: for them and for the built-in model's, the sha256 of the tokens of each thousand
strings (each string's as a count and ids, little-endian u32) and of the texts that they decode to (special tokens
included, each behind a count of its bytes). For the byte-level ones also of the texts without the last token, where
characters may be cut in two. Strings follow from the formula of make_family_goldens.py over the name "string N".
added.json has a small tokenizer in Gemma's manner, whose runs of spaces are added tokens and no special ones, and what
lists of its tokens decode to. `--added` writes this file only.
"""

import hashlib
import json
import pathlib
import struct
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, __version__

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDENS = ROOT / "tests" / "goldens" / "tokenizers"
N_STRINGS, N_CHUNK = 10_000, 1000
WORDS = ["the", " the", "token", "serve", "  ", "\n", "\r\n", "\t", "1234", "don't", "</s>", "<s>", "<|im_end|>", "ing"]
# First code points and sizes of the ranges that characters come from.
RANGES = [(0x20, 95), (0x61, 26), (0xA0, 0x160), (0x300, 0x70), (0x400, 0x100), (0x4E00, 0x5000), (0x1F300, 0x400),
          (0x200B, 5), (0, 0x20), (0x10000, 0x100000)]
MASK = 2**64 - 1


def bits(name):
    # Here, because it needs torch.
    import make_family_goldens as families
    seed, index = families.fnv1a64(name), 0
    while True:
        z = (seed + index * 0x9E3779B97F4A7C15) & MASK
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
        yield z ^ (z >> 31)
        index += 1


def string(number):
    stream = bits(f"string {number}")
    text = ""
    for _ in range(next(stream) % 25):
        z = next(stream)
        kind, rest = z % 14, z >> 8
        if kind < len(RANGES):
            first, size = RANGES[kind]
            text += chr(first + rest % size)
        else:
            text += WORDS[rest % len(WORDS)]
    return text


def corpus():
    return [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]


SPECIALS = [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>", "<|im_end|>")]


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+(?!\S)| ?[^\s\p{N}]+|\s+"), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def sentence_piece():
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIALS + [f"<0x{b:02X}>" for b in range(256)],
                                  max_token_length=8)
    # Only words are learnt from: without a cut between them the trainer would see each file as one.
    words = [" " + word for text in corpus() for word in text.split()]
    tokenizer.train_from_iterator(words, trainer)
    file = json.loads(tokenizer.to_str())
    file["added_tokens"] = [token for token in file["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(file))
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B",
                                                             special_tokens=[("<s>", begin)])
    return tokenizer


def digest(texts):
    whole = hashlib.sha256()
    for text in texts:
        data = text.encode()
        whole.update(struct.pack("<I", len(data)) + data)
    return whole.hexdigest()


def digest_ids(lists):
    whole = hashlib.sha256()
    for ids in lists:
        whole.update(struct.pack(f"<{len(ids) + 1}I", len(ids), *ids))
    return whole.hexdigest()


def golden_of(tokenizer, has_cuts):
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    chunks = []
    for first in range(0, N_STRINGS, N_CHUNK):
        ids = [fast(string(number)).input_ids for number in range(first, first + N_CHUNK)]
        decode = lambda lists: [fast.decode(tokens, skip_special_tokens=False) for tokens in lists]
        cut = digest(decode([tokens[:-1] for tokens in ids])) if has_cuts else None
        chunks.append([digest_ids(ids), digest(decode(ids)), cut])
    return chunks


def write_added():
    words = ["<unk>", "\u2581", "\u2581a", "a", "b", "<0x0A>", "<0xC3>", "<0xA9>"]
    tokenizer = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[("\u2581", "a")],
                                     unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<end_of_turn>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False)
                          for text in ("\u2581\u2581", "\u2581\u2581\u2581", "\n\n", "<image_soft_token>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    lists = [[2, 9, 4], [10, 3], [9], [1, 9, 1], [3, 11, 9, 3], [3, 6, 7, 10, 5], [8, 9, 12]]
    decoded = [[ids, fast.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)] for ids in lists]
    file = dict(made_by=f"transformers {__version__}", tokenizer=json.loads(tokenizer.to_str()), decoded=decoded)
    (GOLDENS / "added.json").write_text(json.dumps(file) + "\n")


def main():
    GOLDENS.mkdir(parents=True, exist_ok=True)
    write_added()
    if "--added" in sys.argv:
        return
    trained = {"byte-level": byte_level(), "sentence-piece": sentence_piece()}
    for name, tokenizer in trained.items():
        (GOLDENS / f"{name}.json").write_text(tokenizer.to_str())
    ember = Tokenizer.from_file(str(ROOT / "models" / "ember" / "tokenizer.json"))
    chunks = {name: golden_of(tokenizer, name != "sentence-piece") for name, tokenizer in
              {"ember": ember, **trained}.items()}
    strings = digest([string(number) for number in range(N_STRINGS)])
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in chunks.items())
    made_by = json.dumps(f"transformers {__version__}")
    (GOLDENS / "golden.json").write_text(f'{{"made_by": {made_by}, "strings": "{strings}",\n{lines}}}\n')


if __name__ == "__main__":
    main()
