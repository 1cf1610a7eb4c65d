#!/usr/bin/env python3
"""Programs that measure servers, against an agent that serves ember: lm-eval, GuideLLM and aiperf, unchanged.

    tests/tools/check_measuring_clients.py AGENT DIRECTORY [NAME...]

AGENT is the program, or the URL of one that runs. Each gets a virtual environment below DIRECTORY, made once (GuideLLM brings PyTorch: several GB). `NAME=PYTHON` takes an interpreter that
has its packages instead. Each must end well with every request answered; lm-eval's log-likelihoods must be those that the endpoint gives for the same
texts with `echo`, and the right sums the likelier ones.
"""

import contextlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv

EMBER = pathlib.Path(__file__).resolve().parents[2] / "models" / "ember"
PACKAGES = {"lm-eval": ["lm-eval[api]==0.4.13", "transformers==5.24.0"], "guidellm": ["guidellm==0.8.1"], "aiperf": ["aiperf==0.13.0"]}
SUMS = [(12, 30), (5, 4), (20, 22), (7, 8)]


def python_of(name, directory):
    home = directory / name
    if not (home / "complete").is_file():
        venv.create(home, with_pip=True)
        subprocess.run([home / "bin/python", "-m", "pip", "install", "-q", *PACKAGES[name]], check=True)
        (home / "complete").touch()
    return home / "bin/python"


# Nothing is asked of a hub: all that is needed is here. aiperf takes no path for a model's name then.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def run(command, folder, environment=OFFLINE):
    environment = {**os.environ, **environment}
    ended = subprocess.run([str(part) for part in command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"


def scripts(python):
    return pathlib.Path(python).parent


def echoed(url, text):
    """Where a text's tokens begin in it, and their log-probabilities. Without the begin token, as lm-eval has them."""
    body = {"prompt": text, "max_tokens": 1, "echo": True, "logprobs": 1, "add_special_tokens": False}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        logprobs = json.load(answer)["choices"][0]["logprobs"]
    return list(zip(logprobs["text_offset"], logprobs["token_logprobs"]))[:-1]


def check_lm_eval(python, url, folder):
    lines = [{"question": f"What is {a} + {b}?", "choices": [f" {a + b}", f" {a + b + 7}"], "answer": 0} for a, b in SUMS]
    (folder / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    task = {"task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "sums.jsonl")}}, "test_split": "test",
            "output_type": "multiple_choice", "target_delimiter": "", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}]}
    (folder / "sums.yaml").write_text(json.dumps(task))
    model = f"model=ember,base_url={url}/v1/completions,tokenizer={EMBER},tokenizer_backend=huggingface"
    run([python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", model, "--tasks", "sums", "--include_path", folder,
         "--log_samples", "--output_path", folder / "out"], folder)
    [samples] = (folder / "out").rglob("samples_sums*.jsonl")
    samples = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(samples) == len(SUMS) and all(sample["acc"] == 1 for sample in samples), samples
    for sample in samples:
        question = sample["doc"]["question"]
        for choice, ((loglikelihood, _),) in zip(sample["doc"]["choices"], sample["resps"]):
            ours = sum(logprob for offset, logprob in echoed(url, question + choice) if offset >= len(question))
            assert abs(float(loglikelihood) - ours) < 1e-3, (question, choice, loglikelihood, ours)
    return f"{len(samples)} questions, all right; log-likelihoods as with echo"


def check_guidellm(python, url, folder):
    run([python, "-m", "guidellm", "run", "--backend", f"kind=openai_http,target={url},model=ember", "--profile", "kind=concurrent,streams=2",
         "--constraint", "kind=max_requests,count=8", "--tokenizer", f"kind=hf_auto,model={EMBER}", "--data",
         "kind=synthetic_text,prompt_tokens=32,output_tokens=8", "--output", f"kind=json,path={folder / 'report.json'}",
         "--disable-console-interactive"], folder)
    metrics = json.loads((folder / "report.json").read_text())["benchmarks"][0]["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (8, 0, 0), totals
    return "8 of 8 requests"


def check_aiperf(python, url, folder):
    run([scripts(python) / "aiperf", "profile", "--model", "ember", "--url", url, "--endpoint-type", "chat", "--streaming", "--request-count", 8,
         "--concurrency", 2, "--tokenizer", EMBER, "--synthetic-input-tokens-mean", 32, "--output-tokens-mean", 8,
         "--output-artifact-dir", folder / "out", "--ui", "none"], folder, {})
    [report] = (folder / "out").rglob("profile_export_aiperf.json")
    report = json.loads(report.read_text())
    assert report["request_count"]["avg"] == 8 and not report.get("error_summary"), report
    return "8 of 8 requests"


CHECKS = {"lm-eval": check_lm_eval, "guidellm": check_guidellm, "aiperf": check_aiperf}


@contextlib.contextmanager
def served(agent):
    """Where an agent answers."""
    if agent.startswith("http"):
        yield agent.rstrip("/")
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [agent, "--model", "builtin://ember", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not is_ready(f"http://127.0.0.1:{port}/readyz"):
            assert process.poll() is None, "the agent ended"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def is_ready(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def main():
    directory = pathlib.Path(sys.argv[2]).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    with served(sys.argv[1]) as url:
        check(url, directory)


def check(url, directory):
    for asked in sys.argv[3:] or CHECKS:
        name, _, python = asked.partition("=")
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: {CHECKS[name](python or python_of(name, directory), url, pathlib.Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
