"""Held-out exact match by greedy generation through transformers, and the file of held-out prompts for other servers.

usage: python evaluate.py --write FILE [--per-task 50]        makes prompts that were never trained on
       python evaluate.py MODEL_DIR --heldout FILE [--mistakes 3]  answers them and prints the share of exact answers

A line of FILE: {"task", "messages" (OpenAI chat messages), "tools" (if any), "expected" (the whole answer as text)}.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import data
import render
from corpus import mix

# Prompt tokens of the long look-up, so that its name is true and the answer fits into the context.
LONG = range(600, 1900)
BATCH = 32


def wire(message, call_id="call_1"):
    """The message as OpenAI clients send it: arguments as JSON text, calls with ids."""
    if message["role"] == "tool":
        return {**message, "tool_call_id": call_id}
    if "tool_calls" not in message:
        return message
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def line(sample):
    """A test sample as one object of the held-out file."""
    made = {"task": sample.task, "messages": [wire(message) for message in sample.messages[:-1]]}
    if sample.tools:
        made["tools"] = sample.tools
    return {**made, "expected": render.said(sample.messages[-1])}


def write_heldout(file, per_task, tokenizer):
    """`per_task` samples of each task, in an order that only depends on the corpus."""
    lines = []
    for task in mix.TESTED:
        samples = data.test_samples(task, per_task * 2, "heldout")
        if task == "lookup_long":
            conversations = [list(render.pieces(sample.messages)) for sample in samples]
            lengths = [len(ids) for ids, _ in data.tokenized(tokenizer, conversations)]
            samples = [sample for sample, length in zip(samples, lengths) if length in LONG]
        lines += [json.dumps(line(sample)) for sample in samples[:per_task]]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} prompts -> {file}")


def load(directory, device):
    """Tokenizer and model, in float32 so that the score does not depend on a device's rounding."""
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    return tokenizer, model


def prompt(tokenizer, asked):
    return tokenizer.apply_chat_template(
        asked["messages"], tools=asked.get("tools"), add_generation_prompt=True, tokenize=False
    )


@torch.no_grad()
def answers(tokenizer, model, lines):
    """The greedy answer to each line. Lines of similar length share a batch, which saves padding."""
    prompts = [prompt(tokenizer, asked) for asked in lines]
    order = sorted(range(len(lines)), key=lambda i: (len(prompts[i]), len(lines[i]["expected"])))
    found = [""] * len(lines)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        batch = tokenizer([prompts[i] for i in chosen], add_special_tokens=False, padding=True, return_tensors="pt")
        batch = batch.to(model.device)
        # One token more than the longest right answer shows whether generation stops there.
        room = max(len(tokenizer(lines[i]["expected"]).input_ids) for i in chosen) + 1
        out = model.generate(**batch, do_sample=False, temperature=None, top_p=None, top_k=None, max_new_tokens=room)
        texts = tokenizer.batch_decode(out[:, batch.input_ids.shape[1] :], skip_special_tokens=False)
        for i, text in zip(chosen, texts):
            found[i] = text.removesuffix(render.PAD * text.count(render.PAD)).removesuffix(render.END)
    return found


def report(lines, found, mistakes):
    """Prints the share of exact answers for each task and over all, and a few of the wrong ones."""
    tasks = {}
    for asked, answer in zip(lines, found):
        right = tasks.setdefault(asked["task"], [])
        right.append(answer == asked["expected"])
        if not right[-1] and right.count(False) <= mistakes:
            print(f"  {asked['task']}: {asked['messages'][-1]['content'][-200:]!r}")
            print(f"    expected {asked['expected']!r}\n    answered {answer!r}")
    for task, right in tasks.items():
        print(f"| {task} | {sum(right)} / {len(right)} | {sum(right) / len(right):.1%} |")
    right = [value for values in tasks.values() for value in values]
    print(f"| **all** | {sum(right)} / {len(right)} | {sum(right) / len(right):.1%} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=Path(__file__).resolve().parents[1])
    parser.add_argument("--write", type=Path)
    parser.add_argument("--per-task", type=int, default=50)
    parser.add_argument("--heldout", type=Path, default=Path(__file__).resolve().parents[1] / "eval" / "heldout.jsonl")
    parser.add_argument("--mistakes", type=int, default=0, help="wrong answers to show for each task")
    args = parser.parse_args()
    if args.write:
        return write_heldout(args.write, args.per_task, Tokenizer.from_file(str(args.model / "tokenizer.json")))
    lines = [json.loads(text) for text in args.heldout.read_text().splitlines()]
    tokenizer, model = load(args.model, "cuda" if torch.cuda.is_available() else "cpu")
    report(lines, answers(tokenizer, model, lines), args.mistakes)


if __name__ == "__main__":
    main()
