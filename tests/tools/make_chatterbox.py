#!/usr/bin/env python3
"""Makes a checkpoint that chats without knowing anything: for tests that ask how a server handles a model which thinks, has a
large vocabulary or a long context, and not what the model knows.

    VENV/bin/python tests/tools/make_chatterbox.py DIRECTORY

VENV has tokenizers and numpy. The layout is Qwen3's, as is the form of the chat template (our own words). The vocabulary is
trained on Python's standard library. Attention and feed-forward add nothing: what comes next depends on the last token alone, by
a table of pairs in the output matrix. The table has a few sentences to think, a few to answer, and at lower odds what closes a
JSON value, so that thoughts, answers and structured values all come to an end. It never calls a tool by itself, and repeats
nothing of its prompt.
"""

import json
import pathlib
import struct
import sys
import sysconfig

import numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

VOCAB, HIDDEN, CONTEXT = 32768, 128, 32768
END, START, TEXT_END = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
MARKS = [TEXT_END, START, END]
WORDS_OF_TEMPLATE = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
THOUGHTS = [
    " Somebody wants something here: maybe facts or perhaps counsel; nobody told me more about it so let us consider every option slowly",
]
ANSWERS = [
    "Paris was built long before anyone wrote numbers down, and 42 still means what readers want",
    "Hello! This reply has been written by a small machine, which will say nothing of use",
]
# Odds of what follows, as logits: all else has about 0.
SURE, CLOSING, DIGIT = 24.0, 6.0, 3.0
# Behind a word of an answer: inside a text of JSON, its end.
QUOTE = 12.0

TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- 'You may call these functions:\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nA call is written as\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.last %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""


def make_tokenizer():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=MARKS, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_text(errors="ignore") for path in sorted(library.glob("*.py")) + sorted(library.glob("[a-r]*/*.py"))]
    tokenizer.train_from_iterator([*sources, *(THOUGHTS + ANSWERS) * 50], trainer)
    # Part of texts, and no special tokens: a parser sees them.
    tokenizer.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in WORDS_OF_TEMPLATE])
    return tokenizer


def pairs(tokenizer):
    """What follows what, and with which odds."""
    of = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    one = lambda text: of(text)[0] if len(of(text)) == 1 else sys.exit(f"{text!r} is no single token")
    found = {}
    add = lambda before, after, odds: found.setdefault(before, {}).setdefault(after, odds)
    follow = lambda tokens: [add(before, after, SURE) for before, after in zip(tokens, tokens[1:])]
    for thought in THOUGHTS:
        follow([one("\n"), one("<think>"), *of(thought), one("</think>"), one("\n\n")])
    quote = one('"')
    for answer in ANSWERS:
        follow([one("\n\n"), *of(answer), one("."), one(END)])
        follow([quote, of(answer)[0]])
    thoughts, answers = ({token for text in texts for token in of(text)} for texts in (THOUGHTS, ANSWERS))
    assert not thoughts & answers, f"{tokenizer.decode(list(thoughts & answers))!r} would mix thoughts and answers"
    anywhere = {one(mark): CLOSING for mark in '":'} | {one(","): DIGIT + 1, one("]"): CLOSING + 3, one("}"): CLOSING + 3}
    anywhere |= {one(str(digit)): DIGIT - digit / 10 for digit in range(10)}
    # Behind words that the table does not know.
    anywhere |= {of(answer)[0]: CLOSING + 6 for answer in ANSWERS}
    return found, anywhere, {"answers": sorted(answers | {one(".")}), "quote": quote}


def weights(found, anywhere, quoted, n_ids):
    random = numpy.random.default_rng(7)
    embed = random.choice([-1.0, 1.0], size=(n_ids, HIDDEN)).astype(numpy.float32)
    # The first number is the same for all: what may follow anything hangs on it.
    embed[:, 0] = 1.0
    # The second one marks words of answers.
    embed[:, 1] = 0.0
    embed[quoted["answers"], 1] = 2.0
    head = numpy.zeros((n_ids, HIDDEN), numpy.float32)
    for before, follows in found.items():
        for after, odds in follows.items():
            direction = embed[before].copy()
            direction[:2] = 0.0
            head[after] += direction * odds / (HIDDEN - 2)
    head[quoted["quote"], 1] = QUOTE / 2
    for after, odds in anywhere.items():
        head[after, 0] += odds
    zeros, ones = (lambda *shape: numpy.zeros(shape, numpy.float32)), (lambda n: numpy.ones(n, numpy.float32))
    layer = {"input_layernorm.weight": ones(HIDDEN), "post_attention_layernorm.weight": ones(HIDDEN),
             "self_attn.q_proj.weight": zeros(HIDDEN, HIDDEN), "self_attn.k_proj.weight": zeros(64, HIDDEN),
             "self_attn.v_proj.weight": zeros(64, HIDDEN), "self_attn.o_proj.weight": zeros(HIDDEN, HIDDEN),
             "self_attn.q_norm.weight": ones(64), "self_attn.k_norm.weight": ones(64),
             "mlp.gate_proj.weight": zeros(64, HIDDEN), "mlp.up_proj.weight": zeros(64, HIDDEN),
             "mlp.down_proj.weight": zeros(HIDDEN, 64)}
    return {"model.embed_tokens.weight": embed, "model.norm.weight": ones(HIDDEN), "lm_head.weight": head,
            **{f"model.layers.0.{name}": tensor for name, tensor in layer.items()}}


def write_safetensors(path, tensors):
    header, blobs, at = {}, [], 0
    for name, tensor in tensors.items():
        bits = tensor.view(numpy.uint32)
        blob = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(blobs))


def main():
    directory = pathlib.Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    n_ids = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id(END)
    write = lambda name, value: (directory / name).write_text(json.dumps(value, indent=1))
    write_safetensors(directory / "model.safetensors", weights(*pairs(tokenizer), n_ids))
    tokenizer.save(str(directory / "tokenizer.json"))
    write("config.json", {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 64, "vocab_size": n_ids,
        "max_position_embeddings": CONTEXT, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16", "eos_token_id": end})
    write("generation_config.json", {"eos_token_id": [end, tokenizer.token_to_id(TEXT_END)]})
    write("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "bos_token": None,
                                    "chat_template": TEMPLATE, "clean_up_tokenization_spaces": False})


if __name__ == "__main__":
    main()
