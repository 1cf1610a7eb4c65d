#!/usr/bin/env python3
"""The built-in model's held-out conversations.

    tests/tools/heldout.py texts FIRST OUT.jsonl     every second one from FIRST (0 or 1) on, as texts: what `stoker-quantize` takes
    tests/tools/heldout.py answers URL [CLIENTS]     asks a server for all answers, greedily, CLIENTS (16) at a time; prints how many are
                                                     exactly as expected
"""

import concurrent.futures
import json
import pathlib
import sys
import urllib.request

HELDOUT = pathlib.Path(__file__).resolve().parents[2] / "models" / "ember" / "eval" / "heldout.jsonl"


def text(row):
    said = [(message["role"], message["content"]) for message in row["messages"]] + [("assistant", row["expected"])]
    return "".join(f"<|{role}|>{content}<|end|>" for role, content in said)


def answer(url, row):
    body = dict(messages=row["messages"], tools=row.get("tools"), temperature=0, max_tokens=200)
    body = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
    message = json.load(urllib.request.urlopen(request, timeout=600))["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    calls = [f'<tool_call>{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}</tool_call>' for call in calls]
    return "".join(calls) or (message["content"] or "").strip()


def main(word, *args):
    rows = [json.loads(line) for line in HELDOUT.open()]
    if word == "texts":
        first, out = args
        pathlib.Path(out).write_text("".join(json.dumps({"text": text(row)}) + "\n" for row in rows[int(first) :: 2]))
        return
    url, clients = args[0], int(args[1]) if len(args) > 1 else 16
    with concurrent.futures.ThreadPoolExecutor(clients) as threads:
        answers = list(threads.map(lambda row: answer(url, row), rows))
    print(f"{sum(a == row['expected'].strip() for a, row in zip(answers, rows))} of {len(rows)}")


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 2 else print(__doc__)
