#!/usr/bin/env python3
"""How many of the built-in model's held-out conversations vLLM answers exactly as expected, greedily, for each checkpoint.

    tests/tools/answers_of_vllm.py DIR...

Each DIR is the built-in model or what `stoker-quantize` made of it. Needs vLLM and a GPU. `heldout.py answers URL` asks our server the same.
A checkpoint that vLLM does not load is named with its last line, and the exit code says so.
"""

import gc
import json
import os
import sys

from heldout import HELDOUT

for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def answers(directory, rows):
    import torch
    import vllm

    llm = vllm.LLM(model=directory, max_model_len=2048, gpu_memory_utilization=0.08, disable_log_stats=True, enforce_eager=True)
    sampling = vllm.SamplingParams(temperature=0, max_tokens=200)
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), add_generation_prompt=True, tokenize=False)
               for row in rows]
    ids = [dict(prompt_token_ids=tokenizer.encode(prompt, add_special_tokens=False)) for prompt in prompts]
    texts = [output.outputs[0].text.strip() for output in llm.generate(ids, sampling, use_tqdm=False)]
    kind = llm.llm_engine.model_config.quantization
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return texts, kind, vllm.__version__


def main(directories):
    rows = [json.loads(line) for line in HELDOUT.open()]
    failed = False
    for directory in directories:
        try:
            texts, kind, version = answers(directory, rows)
        except Exception as error:  # whatever vLLM says is what is to be told
            failed = True
            print(f"{directory}: not loaded: {(str(error) or repr(error)).strip().splitlines()[-1]}", flush=True)
            continue
        right = sum(text == row["expected"].strip() for text, row in zip(texts, rows))
        print(f"{directory}: vLLM {version}, {kind}: {right} of {len(rows)}", flush=True)
    return failed


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print(__doc__)
    else:
        sys.exit(main(sys.argv[1:]))
