#!/usr/bin/env python3
"""What prompts of 8 MB, far beyond the context, cost an agent: how soon each is refused, and what memory is left behind.

    tests/tools/measure_long_prompts.py AGENT [MODEL]

Of one line, and of many, whose ends are escaped in JSON. Each of an agent of its own: apart (memory is given back meanwhile), one after another, then
eight at once, three times over; the agent's resident memory before, at its highest and after. Linux only.
"""

import concurrent.futures
import http.client
import json
import pathlib
import socket
import subprocess
import sys
import time

LONG = {"one line": "The quick brown fox. " * 399_000, "many lines": "The quick brown fox.\n" * 381_000}


def main():
    for kind, text in LONG.items():
        start(kind, text)


def start(kind, text):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = sys.argv[2] if len(sys.argv) > 2 else "builtin://ember"
    command = [sys.argv[1], "--model", model, "--host", "127.0.0.1", "--port", str(port)]
    agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        print(f"{kind}:")
        measure(agent, port, text)
    finally:
        agent.terminate()
        agent.wait()


def measure(agent, port, text):
    pid = agent.pid
    hello, long = (json.dumps({"messages": [{"role": "user", "content": said}], "max_tokens": 4}).encode() for said in ("Hello!", text))
    while ask(port, hello)[0] != 200:
        assert agent.poll() is None, f"the agent ended with {agent.returncode}"
        time.sleep(0.1)
    [ask(port, hello) for _ in range(4)]
    before = memory(pid)["VmRSS"]
    # From here on: what it had at most until now was its start.
    pathlib.Path(f"/proc/{pid}/clear_refs").write_text("5")
    apart = sorted(time.sleep(3) or ask(port, long)[1] for _ in range(7))
    alone = sorted(ask(port, long)[1] for _ in range(7))
    after_one = memory(pid)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            together = sorted(pool.map(lambda _: ask(port, long)[1], range(8)))
    time.sleep(1)
    after = memory(pid)
    print(f"  one, after 3 s of rest: refused in {apart[3] * 1e3:.0f} ms (median of 7), {apart[-1] * 1e3:.0f} at most; one behind another: "
          f"{alone[3] * 1e3:.0f}, {alone[-1] * 1e3:.0f} at most; eight at once: {together[-1] * 1e3:.0f}")
    print(f"  resident: {before:.0f} MB before, {after_one['VmHWM']:.0f} at most with one, {after_one['VmRSS']:.0f} after it, "
          f"{after['VmHWM']:.0f} at most with eight, {after['VmRSS']:.0f} after them")


def ask(port, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    began = time.monotonic()
    try:
        connection.request("POST", "/v1/chat/completions", body)
        answer = connection.getresponse()
        answer.read()
        assert answer.status in (200, 400, 503), answer.status
        return answer.status, time.monotonic() - began
    except ConnectionError:
        return 0, 0.0
    finally:
        connection.close()


def memory(pid):
    """Megabytes that it holds, and that it held at most."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))}


if __name__ == "__main__":
    main()
