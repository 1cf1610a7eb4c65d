#!/usr/bin/env python3
"""Writes the engine's goldens: tiny random Llama checkpoints and what Hugging Face transformers computes with them.

    python3 -m venv VENV && VENV/bin/pip install torch==2.11.0 transformers==5.23.0 safetensors==0.8.0 tokenizers==0.23.3
    VENV/bin/python tests/tools/make_engine_goldens.py                      # the tiny checkpoints
    VENV/bin/python tests/tools/make_engine_goldens.py --model models/ember # golden of a model that exists

A golden is one JSON file beside the checkpoint (tests/goldens/engine/NAME/golden.json):
- `tokens`: the teacher-forced input; `rows`: at some positions, logits of some token ids, the likeliest token and
  the logarithm of the sum of exponentials over the whole vocabulary, computed in float32 from the stored weights;
- `greedy`: the greedy continuation of the first tokens, in float32;
- `weights_sha256`: of the safetensors files in the order of their names, so that a golden of other weights is noticed;
- for bf16 checkpoints, `rows_bf16` (the same computed in bfloat16) and `noise_floor`: the largest difference between
  the two relative to the row's largest logit. No implementation can be expected to agree better than that with a
  bf16 computation, so it is the tolerance of the Rust test for these.
"""

import argparse
import hashlib
import json
import pathlib

import torch
from safetensors import safe_open
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, __version__

GOLDENS = pathlib.Path(__file__).resolve().parent.parent / "goldens" / "engine"
N_TOKENS = 200
N_GREEDY = 48
GREEDY_PROMPT = 24
# Rows across chunk and block borders, the first and the last.
POSITIONS = [0, 1, 15, 16, 17, 63, 64, 127, 128, 150, 198, 199]
# Logits stored per row at most; a stride over the vocabulary.
N_LOGITS = 300
CHAT = [("What is Stoker?", "Stoker serves large language models on a team's own GPUs with one Kubernetes object."),
        ("77 * 50 =", "77 x 50 = 3850"), ("Is the number 95 even?", "No, 95 is odd."), ("Hello!", "Hello!")]
VOCAB = 272
BOS, EOS = 256, 257

LLAMA3 = dict(rope_type="llama3", rope_theta=500000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)

# Each checkpoint is there for what it has that the others have not.
CHECKPOINTS = {
    "gqa-f32": dict(dtype=torch.float32),
    "llama3-rope-tied-bf16": dict(dtype=torch.bfloat16, rope_parameters=LLAMA3, tie_word_embeddings=True,
                                  head_dim=32, num_hidden_layers=3),
    "yarn-biases-f32": dict(dtype=torch.float32, rope_parameters=YARN, attention_bias=True, mlp_bias=True,
                            num_key_value_heads=4),
    "sharded-bf16": dict(dtype=torch.bfloat16, hidden_size=96, num_attention_heads=6, num_key_value_heads=2,
                         shard="150KB"),
    "mqa-f16": dict(dtype=torch.float16, num_key_value_heads=1, rms_norm_eps=1e-6),
}


def byte_tokenizer():
    """One token a byte, a begin and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def make_checkpoint(name, seed):
    """A random checkpoint whose attention is not uniform: the usual initialisation is too small for that."""
    settings = dict(CHECKPOINTS[name])
    dtype, shard = settings.pop("dtype"), settings.pop("shard", "1GB")
    defaults = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=256, rms_norm_eps=1e-5,
                    bos_token_id=BOS, eos_token_id=EOS, initializer_range=0.12, tie_word_embeddings=False)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**defaults, **settings})).to(dtype).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith(".bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
    directory = GOLDENS / name
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=shard)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    return directory


def stored_dtype(directory):
    file = sorted(directory.glob("*.safetensors"))[0]
    with safe_open(file, "pt") as tensors:
        return tensors.get_slice(next(iter(tensors.keys()))).get_dtype()


def load(directory, dtype):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].to(torch.float32)


def rows_of(logits, ids):
    return [dict(position=position, likeliest=int(logits[position].argmax()),
                 log_sum_exp=round(float(logits[position].double().logsumexp(0)), 6),
                 logits=[float(f"{value:.7g}") for value in logits[position, ids].tolist()])
            for position in POSITIONS]


def noise_floor(exact, rounded):
    """Largest difference of a row relative to the row's largest logit, over all rows."""
    difference = (rounded - exact).abs().amax(1) / exact.abs().amax(1)
    return float(difference.max())


def greedy(model, prompt):
    tokens = list(prompt)
    for _ in range(N_GREEDY):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    return tokens[len(prompt):]


def random_tokens(directory):
    vocab = AutoConfig.from_pretrained(directory).vocab_size
    return torch.randint(0, vocab, (N_TOKENS,), generator=torch.Generator().manual_seed(7)).tolist()


def chat_tokens(directory):
    """A trained model is measured on text it was trained for: outside of it, rounding errors grow."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = []
    while len(tokens) < N_TOKENS:
        for question, answer in CHAT:
            messages = [dict(role="user", content=question), dict(role="assistant", content=answer)]
            tokens += tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    return tokens[:N_TOKENS]


def sha256_of_weights(directory):
    digest = hashlib.sha256()
    for file in sorted(directory.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def make_golden(directory, tokens, output):
    exact_model = load(directory, torch.float32)
    vocab = exact_model.config.vocab_size
    ids = list(range(0, vocab, (vocab + N_LOGITS - 1) // N_LOGITS))
    exact = logits_of(exact_model, tokens)
    dtype = stored_dtype(directory)
    golden = dict(made_by=f"transformers {__version__}, torch {torch.__version__.split('+')[0]}", dtype=dtype,
                  weights_sha256=sha256_of_weights(directory), tokens=tokens, ids=ids, rows=rows_of(exact, ids),
                  greedy=dict(prompt=tokens[:GREEDY_PROMPT], tokens=greedy(exact_model, tokens[:GREEDY_PROMPT])))
    if dtype == "BF16":
        rounded = logits_of(load(directory, torch.bfloat16), tokens)
        golden.update(rows_bf16=rows_of(rounded, ids), noise_floor=noise_floor(exact, rounded))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(dump(golden))
    print(f"{output}: {dtype}, noise floor {golden.get('noise_floor', 0):.2e}, "
          f"{len(set(golden['greedy']['tokens']))} different greedy tokens")


def dump(golden):
    """One line a field and a row: a changed row is a changed line."""
    lines = []
    for key, value in golden.items():
        if key.startswith("rows"):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            lines.append(f'"{key}": [\n  {rows}]')
        else:
            lines.append(f'"{key}": {json.dumps(value)}')
    return "{" + ",\n".join(lines) + "}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, help="a model directory; its golden goes beside the others")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if arguments.model:
        directory = arguments.model.resolve()
        make_golden(directory, chat_tokens(directory), GOLDENS / directory.name / "golden.json")
        return
    for seed, name in enumerate(CHECKPOINTS):
        directory = make_checkpoint(name, seed)
        make_golden(directory, random_tokens(directory), directory / "golden.json")


if __name__ == "__main__":
    main()
