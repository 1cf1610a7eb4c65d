#!/usr/bin/env python3
"""Writes the golden of rerankers: a tiny random causal model as sentence-transformers saves one, and the scores that it gives.

    python3 -m venv VENV && VENV/bin/pip install torch==2.11.0 transformers==5.24.0 sentence-transformers==6.2.0
    VENV/bin/python tests/tools/make_rerank_goldens.py

`tests/goldens/rerank/qwen3-logits/golden.json`: `query` and `documents`, and their `scores` in float32, `raw` without the model's
activation, both with the model's own instruction; `told` with the `instruction` beside it. The template has the form of
Qwen3-Reranker's: both texts and an instruction in one question, the assistant's turn opened if that is asked for, which the
model's settings do.
"""

import json
import pathlib

import torch
from make_embedding_goldens import SHAPE, byte_tokenizer
from sentence_transformers import CrossEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from transformers import Qwen3Config, Qwen3ForCausalLM

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "goldens" / "rerank" / "qwen3-logits"
OWN, OTHER = "Find what answers the question.", "Find what says the opposite."
QUERY = "How high is the tower?"
DOCUMENTS = ["It is 300 m high.", "Grüße, 世界! \U0001f680", "a", "the same words " * 12, "It is 300 m high."]
TEMPLATE = """\
{%- set told = messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("Anything.", true) -%}
[{{ told }}]
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}
{%- if add_generation_prompt %}
Answer: {% endif -%}
"""


def model():
    torch.manual_seed(7)
    made = Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True)).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def main():
    plain = GOLDEN / "plain"
    model().save_pretrained(plain)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(plain)
    reads = Transformer(str(plain), transformer_task="text-generation",
                        processing_kwargs={"chat_template": {"add_generation_prompt": True}})
    yes, no = tokenizer.convert_tokens_to_ids(["y", "n"])
    whole = CrossEncoder(modules=[reads, LogitScore(yes, no)], device="cpu", prompts={"find": OWN}, default_prompt_name="find")
    whole.save_pretrained(str(GOLDEN), create_model_card=False)
    for file in plain.iterdir():
        file.unlink()
    plain.rmdir()
    # One at a time: nothing is padded.
    score = lambda **options: [float(whole.predict([(QUERY, document)], **options)[0]) for document in DOCUMENTS]
    golden = dict(query=QUERY, documents=DOCUMENTS, instruction=OTHER, scores=score(),
                  raw=score(activation_fn=torch.nn.Identity()), told=score(prompt=OTHER))
    (GOLDEN / "golden.json").write_text(json.dumps(golden, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
