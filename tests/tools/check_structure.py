#!/usr/bin/env python3
"""What structured output is worth, against a running agent that serves ember.

    pip install jsonschema
    pip download --no-deps --no-binary :all: jsonschema && tar xf jsonschema-*.tar.gz   # carries the test suite of JSON Schema
    python3 tests/tools/check_structure.py http://127.0.0.1:8000 jsonschema-*/json/tests/draft2020-12

- ember's held-out tasks that ask for JSON and for tool calls, free and constrained: exact matches, and missing keys;
- schemas of the suite: how many are refused, and whether every answer that ended by itself validates.
Exits with 1 if a constrained answer breaks its schema, misses a required key, or is right less often than a free one.
"""

import argparse
import collections
import json
import pathlib
import sys
import urllib.error
import urllib.request

import jsonschema

HELD_OUT = pathlib.Path(__file__).resolve().parents[2] / "models" / "ember" / "eval" / "heldout.jsonl"


def ask(base, **body):
    request = urllib.request.Request(f"{base}/v1/chat/completions", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.load(response)["choices"][0]
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]


def schema_of(value):
    kinds = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", type(None): "null", dict: "object"}
    properties = {key: {"type": kinds[type(item)]} for key, item in value.items()}
    return {"type": "object", "properties": properties, "required": list(value), "additionalProperties": False}


def extract(base, tasks):
    right, missing = collections.Counter(), 0
    for task in tasks:
        expected = json.loads(task["expected"])
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema_of(expected)}}
        for name, options in [("free", {}), ("constrained", {"response_format": form})]:
            answer = ask(base, messages=task["messages"], temperature=0, max_tokens=300, **options)
            try:
                found = json.loads(answer["message"]["content"])
            except (KeyError, json.JSONDecodeError):
                found = None
            right[name] += found == expected
            if name == "constrained" and answer.get("finish_reason") == "stop":
                missing += not set(expected) <= set(found or {})
    return right, missing


def calls(base, tasks):
    right, missing = collections.Counter(), 0
    for task in tasks:
        expected = [json.loads(call.removeprefix("<tool_call>")) for call in task["expected"].split("</tool_call>") if call.strip()]
        for name, options in [("free", {}), ("constrained", {"tool_choice": "required"})]:
            answer = ask(base, messages=task["messages"], tools=task["tools"], temperature=0, max_tokens=300, **options)
            made = [call["function"] for call in answer.get("message", {}).get("tool_calls", [])]
            try:
                found = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in made]
            except json.JSONDecodeError:
                found = None
            right[name] += found == expected
            required = {tool["function"]["name"]: tool["function"]["parameters"].get("required", []) for tool in task["tools"]}
            if name == "constrained" and answer.get("finish_reason") == "tool_calls":
                missing += any(set(required[call["name"]]) - set(call["arguments"]) for call in found or [])
    return right, missing


def suite(base, directory):
    outcomes, reasons, broken = collections.Counter(), collections.Counter(), []
    for file in sorted(directory.glob("*.json")):
        for case in json.loads(file.read_text()):
            schema = case["schema"]
            answer = ask(base, messages=[{"role": "user", "content": "Write JSON."}], guided_json=schema, max_tokens=120,
                         temperature=1, seed=1)
            if "finish_reason" not in answer:
                outcomes["refused"] += 1
                reasons[f"{file.stem}: {answer['message'][:150]}"] += 1
            elif answer["finish_reason"] != "stop":
                outcomes["cut off"] += 1
            else:
                try:
                    jsonschema.Draft202012Validator(schema).validate(json.loads(answer["message"]["content"]))
                    outcomes["valid"] += 1
                except Exception as error:  # noqa: BLE001: whatever it is, the answer does not hold
                    outcomes["broken"] += 1
                    broken.append(f"{file.stem}, {case['description']}: {answer['message']['content'][:200]!r}: {str(error)[:200]}")
    return outcomes, reasons, broken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("suite", type=pathlib.Path, nargs="?")
    parser.add_argument("--reasons", action="store_true", help="print why schemas are refused")
    arguments = parser.parse_args()
    tasks = collections.defaultdict(list)
    for line in HELD_OUT.read_text().splitlines():
        task = json.loads(line)
        tasks[task["task"]].append(task)
    failed = False
    objects = [task for task in tasks["extract"] if task["expected"].startswith("{")]
    called = [task for task in tasks["tools"] if task["expected"].startswith("<tool_call>")]
    for name, (right, missing), n in [("extract", extract(arguments.base, objects), len(objects)),
                                      ("tools", calls(arguments.base, called), len(called))]:
        print(f"{name}: free {right['free']} / {n}, constrained {right['constrained']} / {n}, keys missing in {missing}")
        failed |= missing > 0 or right["constrained"] < right["free"]
    if arguments.suite:
        outcomes, reasons, broken = suite(arguments.base, arguments.suite)
        print(f"draft 2020-12: {dict(outcomes)}, refused {outcomes['refused'] / sum(outcomes.values()):.1%}")
        print("\n".join(broken))
        if arguments.reasons:
            print("\n".join(f"{n} x {reason}" for reason, n in reasons.most_common()))
        failed |= bool(broken)
    sys.exit(failed)


if __name__ == "__main__":
    main()
