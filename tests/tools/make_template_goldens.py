#!/usr/bin/env python3
"""Writes the golden of chat templates: what transformers renders from public models' templates, as digests.

    VENV/bin/python tests/tools/make_template_goldens.py [DIRECTORY [GOLDEN]]     # VENV as for make_engine_goldens.py

DIRECTORY holds templates, NAME.jinja each: models/templates of llama.cpp's sources has those of golden.json, and
fetch_templates.py brings those of packages.json. Templates belong to their
models, so neither they nor what they render are kept here, only sha256 digests of both. tests/goldens/templates has
- conversations.json, written by hand: messages, tools, and whether the assistant's turn is opened;
- golden.json and packages.json: for each template its digest, and for each conversation the digest of the prompt, null where the
  template refuses the conversation, or "fails" where transformers fails otherwise and nothing is to be compared;
- dialect_cases.json, written by hand: small templates of ours for what the dialect of chat templates has, and variables;
- dialect.json: for each of them what transformers renders, or null where it fails. Made also without DIRECTORY.
"""

import argparse
import datetime
import hashlib
import json
import pathlib

import jinja2
from transformers import __version__
from transformers.utils import chat_template_utils

GOLDENS = pathlib.Path(__file__).resolve().parent.parent / "goldens" / "templates"


class Now(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 11, 21, 10, 3)


# Not a prompt: Python itself fails in the template, as with a loop over tools when there are none.
FAILS = object()


def digest(text):
    if text is FAILS:
        return "fails"
    return hashlib.sha256(text.encode()).hexdigest()


def render(template, conversation):
    try:
        rendered, _ = chat_template_utils.render_jinja_template(
            [conversation["messages"]], tools=conversation.get("tools"), chat_template=template,
            add_generation_prompt=conversation["add_generation_prompt"], bos_token="<s>", eos_token="</s>")
        return rendered[0]
    except jinja2.exceptions.TemplateError:
        return None
    except TypeError:
        return FAILS


def write_dialect():
    cases = json.loads((GOLDENS / "dialect_cases.json").read_text())
    outputs = []
    for template in cases["templates"]:
        try:
            rendered, _ = chat_template_utils.render_jinja_template(
                [[]], chat_template=template, bos_token="<s>", **cases["variables"])
            outputs.append(rendered[0])
        except Exception:  # Whatever Python says: there is no prompt.
            outputs.append(None)
    made_by = json.dumps(f"transformers {__version__}, jinja2 {jinja2.__version__}")
    lines = ",\n  ".join(json.dumps(output) for output in outputs)
    (GOLDENS / "dialect.json").write_text(f'{{"made_by": {made_by},\n"outputs": [\n  {lines}]}}\n')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path, nargs="?")
    parser.add_argument("golden", nargs="?", choices=["golden.json", "packages.json"], default="golden.json")
    parser.add_argument("--show", nargs=2, metavar=("NAME", "IDX"), help="print one prompt instead")
    arguments = parser.parse_args()
    chat_template_utils.datetime = Now
    write_dialect()
    if arguments.directory is None:
        return
    conversations = json.loads((GOLDENS / "conversations.json").read_text())
    read = lambda name: (arguments.directory / f"{name}.jinja").read_bytes().decode()
    if arguments.show:
        name, idx = arguments.show
        print(render(read(name), conversations[int(idx)]), end="")
        return
    templates = []
    for name in sorted(file.stem for file in arguments.directory.glob("*.jinja")):
        prompts = [render(read(name), conversation) for conversation in conversations]
        templates.append([name, digest(read(name)), [prompt and digest(prompt) for prompt in prompts]])
        print(f"{name}: {sum(prompt is None for prompt in prompts)} of {len(prompts)} refused")
    golden = dict(made_by=f"transformers {__version__}, jinja2 {jinja2.__version__}", templates=templates)
    lines = ",\n  ".join(json.dumps(template) for template in templates)
    text = f'{{"made_by": {json.dumps(golden["made_by"])},\n"templates": [\n  {lines}]}}\n'
    (GOLDENS / arguments.golden).write_text(text)


if __name__ == "__main__":
    main()
