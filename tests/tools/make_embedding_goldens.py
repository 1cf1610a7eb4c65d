#!/usr/bin/env python3
"""Writes the goldens of embeddings: tiny random models as sentence-transformers saves them, and the vectors it makes with them.

    python3 -m venv VENV && VENV/bin/pip install torch==2.11.0 transformers==5.23.0 sentence-transformers==6.2.0
    VENV/bin/python tests/tools/make_embedding_goldens.py

`tests/goldens/embeddings/NAME/golden.json`: `texts`, and of each its vector in `vectors`, computed in float32. The models are
saved without the part that predicts tokens, as published embedding models are. `qwen3-last` ends texts with a token of its own,
takes the last token and makes vectors of length 1, as Qwen3-Embedding does; `llama-mean` takes the mean of all tokens as it is.
"""

import json
import pathlib

import torch
from sentence_transformers import SentenceTransformer, models
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers import models as tokenizer_models
from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

GOLDENS = pathlib.Path(__file__).resolve().parent.parent / "goldens" / "embeddings"
VOCAB, END = 272, 256
TEXTS = ["a", "Stoker serves large language models.", "Grüße, 世界! \U0001f680", "the same words " * 20, "  spaces\n\nand lines\t"]
SHAPE = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=VOCAB, max_position_embeddings=512, rms_norm_eps=1e-5, initializer_range=0.12, eos_token_id=END,
             bos_token_id=None)
MODELS = {
    "qwen3-last": (Qwen3Model, Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True), "lasttoken", True),
    "llama-mean": (LlamaModel, LlamaConfig(**SHAPE, tie_word_embeddings=True), "mean", False),
}


def byte_tokenizer():
    """One token a byte, and one behind the last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(tokenizer_models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", END)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", padding_side="left")


def make(name, seed):
    kind, config, pooling, normalizes = MODELS[name]
    torch.manual_seed(seed)
    inner = kind(config).to(torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in inner.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    plain = GOLDENS / name / "plain"
    inner.save_pretrained(plain)
    byte_tokenizer().save_pretrained(plain)
    reads = models.Transformer(str(plain))
    parts = [reads, models.Pooling(config.hidden_size, pooling_mode=pooling)] + [models.Normalize()] * normalizes
    whole = SentenceTransformer(modules=parts, device="cpu")
    whole.save_pretrained(str(GOLDENS / name), create_model_card=False)
    for file in plain.iterdir():
        file.unlink()
    plain.rmdir()
    # One at a time: nothing is padded.
    vectors = [whole.encode([text])[0].tolist() for text in TEXTS]
    golden = dict(texts=TEXTS, vectors=[[float(f"{value:.8g}") for value in vector] for vector in vectors])
    (GOLDENS / name / "golden.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for seed, name in enumerate(MODELS):
        make(name, seed)
