#!/usr/bin/env python3
"""Runs vLLM's own tests of its OpenAI server against an agent, as a measure of what clients of vLLM find here.

    VENV/bin/python tests/tools/vllm_suite.py AGENT DIRECTORY [--model ember|chatterbox] [--only PART] [--figures FILE]
        [-- PYTEST ARGUMENTS]

AGENT is the program. VENV has openai, anthropic, pytest, pytest-asyncio, pypi-simple, regex, requests, jsonschema, numpy,
tokenizers, schemathesis, hypothesis, fastapi, aiohttp and httpx. The tests come out of vLLM's source distribution into
DIRECTORY and are not changed; nothing of them is kept here. Each module's server is an agent that serves one of two models
under the name that the module asks for. What is no test of a server (it takes no server and no client) is left out.

A module that asks for a model of Qwen's or for gpt-oss gets `chatterbox`, which make_chatterbox.py makes in DIRECTORY: like
those it thinks, and has a large vocabulary and a long context; unlike those it knows nothing. Every other module gets the
built-in `ember`. --model gives all modules the same.

vLLM and torch are not installed. What a test wants to know from them of its model (its tokenizer, the size of its
vocabulary, where it lies, the range of a seed) it is told of the model that it gets; whatever else it takes from them is an
object that fails when it is used. Prints a line a test and ends with the counts, which it appends to FILE as a figure.
"""

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import types
import urllib.request
from unittest import mock

VERSION = "0.33.0"
STUBBED = ("vllm", "torch", "torchvision", "PIL", "datasets", "lm_eval", "tensorizer", "huggingface_hub", "openai_harmony",
           "transformers", "pybase64", "mcp", "gpt_oss", "safetensors", "ray", "cloudpickle", "zmq")
SUITES = ["tests/entrypoints/openai", "tests/entrypoints/anthropic"]
SHELLS = ("tests/__init__.py", "tests/entrypoints/__init__.py", "tests/entrypoints/conftest.py")
EMBER = pathlib.Path(__file__).resolve().parents[2] / "models" / "ember"
# Where the model lies that is served.
MODEL = pathlib.Path(os.environ.get("SUITE_MODEL", EMBER))


class Tokenizer:
    """The model's, by the names that transformers gives its methods."""

    def __init__(self, *_, **__):
        import tokenizers
        self.inner = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))

    def encode(self, text, add_special_tokens=True):
        return self.inner.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, tokens, skip_special_tokens=False):
        return self.inner.decode(tokens, skip_special_tokens=skip_special_tokens)


class ModelConfig:
    """What there is to know of the model."""

    def __init__(self, *_, **__):
        pass

    def get_vocab_size(self):
        return json.loads((MODEL / "config.json").read_text())["vocab_size"]


def seeds(_):
    return types.SimpleNamespace(min=-2**63, max=2**63 - 1)


# What tests take from modules that are not there, where it is a fact of the model and not a part of vLLM.
FACTS = {
    "vllm.tokenizers.get_tokenizer": Tokenizer,
    "vllm.config.ModelConfig": ModelConfig,
    "vllm.model_executor.model_loader.weight_utils.download_weights_from_hf": lambda name, **_: name,
    "torch.iinfo": seeds,
}


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that are not there, with any name in them."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = lambda name: FACTS.get(f"{spec.name}.{name}") or mock.MagicMock(name=f"{spec.name}.{name}")
        return module

    def exec_module(self, module):
        pass


class Server:
    """What the tests take for a server of vLLM's."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(self, model, arguments=(), env_dict=None, **_):
        files = "builtin://ember" if MODEL == EMBER else str(MODEL)
        command = [os.environ["STOKER_AGENT"], "--model", files, "--host", "127.0.0.1", "--port", "0", "--served-name", model]
        # What clients call the model and the server's paths, which key they send and what answers say; how it is served is ours to say.
        if "--served-model-name" in arguments:
            command += ["--served-name", arguments[arguments.index("--served-model-name") + 1]]
        if "--root-path" in arguments:
            command += ["--root-path", arguments[arguments.index("--root-path") + 1]]
        if "--return-tokens-as-token-ids" in arguments:
            command.append("--return-tokens-as-token-ids")
        if "--enable-per-request-metrics" in arguments:
            command.append("--per-request-metrics")
        # vLLM tells thoughts from answers only where it is told how the model writes them.
        if "gpt-oss" not in model and not any(argument.startswith("--reasoning-parser") for argument in arguments):
            command += ["--reasoning-format", "none"]
        if key := (env_dict or {}).get("VLLM_API_KEY"):
            self.keys = tempfile.NamedTemporaryFile("w")
            self.keys.write(key)
            self.keys.flush()
            command += ["--api-key-file", self.keys.name]
        self.log = tempfile.NamedTemporaryFile("w+")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        self.host, self.port = "127.0.0.1", None
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            if self.is_ready():
                return
            time.sleep(0.05)
        self.process.kill()
        raise RuntimeError(f"the agent did not become ready: {self.said()[-1000:]}")

    def is_ready(self):
        """Asks where it says that it listens: a port that was chosen for it may be somebody's by then."""
        address = re.search(r'"address":"127.0.0.1:(\d+)"', self.said())
        self.port = address and int(address[1])
        with contextlib.suppress(OSError):
            return address and urllib.request.urlopen(self.url_for("readyz"), timeout=5)

    def said(self):
        return pathlib.Path(self.log.name).read_text()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    @property
    def url_root(self):
        return f"http://127.0.0.1:{self.port}"

    def url_for(self, *parts):
        return "/".join([self.url_root, *parts])

    def get_client(self, **options):
        import openai
        return openai.OpenAI(base_url=self.url_for("v1"), api_key="unused", max_retries=0, **{"timeout": 60, **options})

    def get_async_client(self, **options):
        import openai
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key="unused", max_retries=0, **{"timeout": 60, **options})

    def get_client_anthropic(self, **options):
        import anthropic
        return anthropic.Anthropic(base_url=self.url_root, api_key="unused", max_retries=0, **options)

    def get_async_client_anthropic(self, **options):
        import anthropic
        return anthropic.AsyncAnthropic(base_url=self.url_root, api_key="unused", max_retries=0, **options)


def stand_in():
    """Before any conftest is imported."""
    sys.meta_path.append(Stubs())
    utils = types.ModuleType("tests.utils")
    utils.__getattr__ = lambda name: mock.MagicMock(name=f"tests.utils.{name}")
    utils.RemoteOpenAIServer = utils.RemoteVLLMServer = utils.RemoteAnthropicServer = Server
    sys.modules["tests.utils"] = utils


if "SUITE_REPORT" in os.environ:
    stand_in()


def pytest_collection_modifyitems(config, items):
    of_server = [item for item in items if {"server", "client", "server_fixture", "get_schema"} & set(item.fixturenames)]
    config.hook.pytest_deselected(items=[item for item in items if item not in of_server])
    items[:] = of_server


def fetch(directory):
    from pypi_simple import PyPISimple

    directory.mkdir(parents=True, exist_ok=True)
    if (directory / "complete").is_file():
        return
    with PyPISimple() as client:
        packages = client.get_project_page("vllm").packages
        package = next(p for p in packages if p.package_type == "sdist" and p.version == VERSION)
        client.download_package(package, directory / package.filename)
    with tarfile.open(directory / package.filename) as archive:
        for member in archive:
            inner = member.name.partition("/")[2]
            if member.isfile() and (inner in SHELLS or any(inner.startswith(suite) for suite in SUITES)):
                member.name = inner
                archive.extract(member, directory, filter="data")
    (directory / "complete").write_text(VERSION)


def modules(directory):
    """Those that start a server of their own."""
    found = [path for suite in SUITES for path in sorted((directory / suite).rglob("test_*.py"))]
    starts = lambda path: "RemoteOpenAIServer" in path.read_text() or "RemoteAnthropicServer" in path.read_text()
    with_shared = lambda path: (path.parent / "conftest.py").is_file() and starts(path.parent / "conftest.py")
    return [path for path in found if starts(path) or with_shared(path)]


def model_for(path):
    """By the model that a module asks for, or the conftest beside it where the module names none."""
    names = [re.search(r"(Qwen|gpt-oss|HuggingFaceH4|google|facebook|unsloth|HuggingFaceTB|openai-community)", file.read_text())
             for file in (path, path.parent / "conftest.py") if file.is_file()]
    named = next((found[1] for found in names if found), None)
    return "chatterbox" if named in ("Qwen", "gpt-oss") else "ember"


def directory_of(model, directory):
    if model == "ember":
        return EMBER
    made = directory / "chatterbox"
    if not (made / "tokenizer_config.json").is_file():
        maker = pathlib.Path(__file__).with_name("make_chatterbox.py")
        subprocess.run([sys.executable, str(maker), str(made)], check=True)
    return made


def run(path, directory, model, arguments):
    report = directory / "report.json"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": f"{pathlib.Path(__file__).parent}:{directory}", "SUITE_REPORT": str(report),
                   "SUITE_MODEL": str(directory_of(model, directory))}
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "vllm_suite", "-p", "no:cacheprovider", "--rootdir",
               str(directory), "-o", "asyncio_mode=auto", "--tb=line", *arguments, str(path)]
    ended = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=1200)
    outcomes = json.loads(report.read_text()) if report.is_file() else {}
    if not outcomes:
        print(f"{path.relative_to(directory)}: no test ran: {ended.stdout.strip().splitlines()[-1:]}")
    return outcomes


OUTCOMES = {}


def pytest_runtest_logreport(report):
    failed_to_start = report.when != "call" and report.outcome != "passed"
    if report.when == "call" or failed_to_start:
        reason = "" if report.outcome == "passed" else str(report.longrepr).strip().splitlines()[-1][:300]
        OUTCOMES[report.nodeid] = [report.outcome, reason]


def pytest_sessionfinish():
    if "SUITE_REPORT" in os.environ:
        pathlib.Path(os.environ["SUITE_REPORT"]).write_text(json.dumps(OUTCOMES))


def figure(counts):
    """The line of docs/benchmarks/results for these counts."""
    passed, now = counts.get("passed", 0), time.strftime("%Y-%m-%dT%H-%M", time.gmtime())
    cpu = next(line for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=EMBER, capture_output=True, text=True, check=True)
    return {"run": f"{now}-vllm-suite", "commit": commit.stdout.strip(), "machine": f"{os.cpu_count()} cores, {cpu.partition(':')[2].strip()}",
            "system": "stoker", "version": "0.1.0", "model": "ember and chatterbox", "dtype": "bf16", "case": "peer_suite_vllm",
            "metric": "passed", "value": passed, "n": 1, "min": passed, "max": passed,
            "command": "tests/tools/vllm_suite.py AGENT DIRECTORY --figures FILE"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agent", type=pathlib.Path)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--figures", type=pathlib.Path)
    parser.add_argument("--model", choices=["ember", "chatterbox"])
    parser.add_argument("--only", default="", help="part of the paths of modules to run")
    parser.add_argument("arguments", nargs="*")
    asked = parser.parse_intermixed_args()
    directory = asked.directory.resolve()
    os.environ["STOKER_AGENT"] = str(asked.agent.resolve())
    fetch(directory)
    counts = {}
    for path in modules(directory):
        if asked.only not in str(path):
            continue
        model = asked.model or model_for(path)
        for name, (outcome, reason) in run(path, directory, model, asked.arguments).items():
            counts[outcome] = counts.get(outcome, 0) + 1
            print(f"{outcome:7} {model:10} {name} {reason}", flush=True)
    print(json.dumps({"suite": f"vllm {VERSION}", **counts}))
    if asked.figures:
        with asked.figures.open("a") as figures:
            figures.write(json.dumps(figure(counts), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
