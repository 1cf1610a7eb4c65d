"""transformers as a peer of stoker-bench: loads a checkpoint, then measures what each line of its input asks for.

usage: transformers-peer.py MODEL THREADS      needs torch and transformers, for a GGUF file gguf too

MODEL is a directory, or a GGUF file. Of the latter transformers widens all blocks at start, as it does wherever it has no
kernel for them from a hub, here to bfloat16, which is its fastest format.

Prints {"version": ...} once it is ready. A line of input is {"requests": N, "prompt": N, "completion": N}; the answer is
{"first": SECONDS, "last": SECONDS}: from the start to the first token of all, and to the last. Prompts are fresh random tokens,
decoded greedily in one static batch.
"""

import json
import pathlib
import sys
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, GgufConfig


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    torch.set_num_threads(int(sys.argv[2]))
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(**files(sys.argv[1]), attn_implementation="sdpa").eval()
    answer({"version": transformers.__version__})
    for line in sys.stdin:
        work = json.loads(line)
        first, last = generate(model, work["requests"], work["prompt"], work["completion"])
        answer({"first": first, "last": last})


def files(model: str) -> dict:
    path = pathlib.Path(model)
    if path.is_dir():
        return {"pretrained_model_name_or_path": model, "dtype": "auto"}
    widened = GgufConfig(dequantize=True)
    here = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return {**here, "dtype": torch.bfloat16, "quantization_config": widened}


def generate(model, requests: int, prompt: int, completion: int) -> tuple[float, float]:
    vocabulary = model.config.vocab_size
    tokens = torch.randint(vocabulary // 128, vocabulary - vocabulary // 16, (requests, prompt))
    begun = time.perf_counter()
    # Only the last position's logits are needed, as for every other contender.
    output = model(tokens, use_cache=True, logits_to_keep=1)
    tokens = output.logits[:, -1].argmax(-1, keepdim=True)
    first = time.perf_counter() - begun
    for _ in range(completion - 1):
        output = model(tokens, past_key_values=output.past_key_values, use_cache=True)
        tokens = output.logits[:, -1].argmax(-1, keepdim=True)
    return first, time.perf_counter() - begun


def answer(value: dict) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
