#!/usr/bin/env python3
"""Makes a tokenizer.json of Mistral's Tekken, a vocabulary of 131,072 tokens, out of the file in the package mistral-common.

    tools/bench/tekken.py FILE [--merges]

For benches of what depends on a large vocabulary. Without merges it encodes every text byte by byte; with them, which takes
a minute, as the model's own does. Nothing of the package is kept in this repository.
"""

import base64
import json
import pathlib
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "mistral-common==1.5.4"
TEKKEN = "mistral_common/data/tekken_240911.json"


def byte_letters():
    """The letters in which byte-level vocabularies write bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + n) for n, byte in enumerate(others)}


def merges(ranks):
    """The pair that each token is merged of: what merging by lower ranks alone leaves of it."""
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[n : n + 1] for n in range(len(token))]
        while len(parts) > 2:
            pairs = [ranks.get(parts[n] + parts[n + 1], rank) for n in range(len(parts) - 1)]
            if min(pairs) >= rank:
                break
            n = pairs.index(min(pairs))
            parts[n : n + 2] = [parts[n] + parts[n + 1]]
        if len(parts) == 2:
            yield parts


def main():
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", directory, PACKAGE]
        subprocess.run(command, check=True)
        wheel = next(pathlib.Path(directory).glob("*.whl"))
        tekken = json.loads(zipfile.ZipFile(wheel).read(TEKKEN))
    config, letters = tekken["config"], byte_letters()
    n_special = config["default_num_special_tokens"]
    specials = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{n}>" for n in range(3, n_special))]
    vocab = {text: n for n, text in enumerate(specials)}
    for entry in tekken["vocab"][: config["default_vocab_size"] - n_special]:
        text = "".join(letters[byte] for byte in base64.b64decode(entry["token_bytes"]))
        vocab[text] = n_special + entry["rank"]
    added = [{"id": n, "content": text, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False} for n, text in enumerate(specials)]
    words = {base64.b64decode(entry["token_bytes"]): entry["rank"]
             for entry in tekken["vocab"][: config["default_vocab_size"] - n_special]}
    spelt = lambda token: "".join(letters[byte] for byte in token)  # noqa: E731
    pairs = [[spelt(left), spelt(right)] for left, right in merges(words)] if "--merges" in sys.argv else []
    split = {"type": "Split", "pattern": {"Regex": config["pattern"]}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
                 "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]} if pairs else byte_level,
                 "post_processor": None, "decoder": byte_level,
                 "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                           "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": pairs}}
    pathlib.Path(sys.argv[1]).write_text(json.dumps(tokenizer))


if __name__ == "__main__":
    main()
