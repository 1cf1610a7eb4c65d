#!/usr/bin/env python3
"""JSON schemas that others wrote, and a judge of what grammars make of them.

    VENV/bin/python tests/tools/json_schemas.py suite DIRECTORY        # fetches JSON Schema's own tests, draft 2020-12
    VENV/bin/python tests/tools/json_schemas.py judge OUT              # OUT: of `stoker-bench schemas DIRECTORY --out OUT`

VENV has jsonschema 4.25.1, whose source distribution carries the suite, and llguidance, the library that compiles our grammars.
`judge` says how many of the texts that were drawn are valid by the former, and how many of the schemas that we refuse the
latter takes by itself. Nothing of it is kept here. For schemas of the kind that people write give `stoker-bench schemas` the
folder `maskbench/data` or `data` of JSONSchemaBench (github.com/guidance-ai/jsonschemabench).
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile

SOURCE = "jsonschema==4.25.1"
SUITE = "json/tests/draft2020-12/"


def suite(directory):
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", folder, SOURCE],
                       check=True)
        archive = next(pathlib.Path(folder).glob("*.tar.gz"))
        with tarfile.open(archive) as members:
            for member in members:
                inner = member.name.partition("/")[2]
                if member.isfile() and inner.startswith(SUITE) and "/optional/" not in inner:
                    target = directory / inner.removeprefix(SUITE)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(members.extractfile(member).read())
    print(len(list(directory.rglob("*.json"))), "files")


def judge(out):
    import jsonschema
    import llguidance
    from jsonschema.validators import validator_for

    lines = [json.loads(line) for line in out.read_text().splitlines()]
    refused = [line for line in lines if "refused" in line]
    plain = lambda schema: llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    taken = [line for line in refused if not plain(line["schema"])]
    print(f"refused {len(refused)}, of which llguidance {llguidance.__version__} takes {len(taken)}")
    for line in taken[:10]:
        print(" ", line["name"], line["refused"][:160])

    counts = {"valid": 0, "invalid": 0, "no judge": 0, "not whole": 0}
    for line in (line for line in lines if "text" in line):
        if not line["is_whole"]:
            counts["not whole"] += 1
            continue
        try:
            # A text that is no JSON is as wrong as one that is not of its schema.
            value = json.loads(line["text"])
            judge_class = validator_for(line["schema"], default=jsonschema.Draft202012Validator)
            wrong = next(judge_class(line["schema"]).iter_errors(value), None)
        except json.JSONDecodeError as reason:
            wrong = reason
        except Exception as reason:  # A reference that leads nowhere here, an expression that Python does not know.
            counts["no judge"] += 1
            print("  no judge:", line["name"], type(reason).__name__, str(reason)[:100])
            continue
        counts["invalid" if wrong else "valid"] += 1
        if wrong:
            print("  invalid:", line["name"], str(wrong).splitlines()[0][:140], "text:", line["text"][:100])
    print(json.dumps(counts))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", choices=["suite", "judge"])
    parser.add_argument("path", type=pathlib.Path)
    asked = parser.parse_args()
    (suite if asked.word == "suite" else judge)(asked.path)


if __name__ == "__main__":
    main()
