"""vLLM as a peer of stoker-bench on a GPU: the same cases, printed as lines `SAMPLES {json}` among its own log.

usage: vllm-peer.py CONFIG_DIRECTORY [quick|sampled|mix] [fp8] [kv=fp8] [tp=2] [pp=2]      needs vLLM; the directory holds a config.json and no weights

With `sampled` the cases are those with sampling options, as bench/src/sampled.rs has them, but for seeds: it has none to keep.

With `mix` it answers the open load of each file in $ARRIVALS, as `stoker-bench arrivals N` prints it into a file N, by its own
asynchronous engine.

With fp8 it quantises weights when it loads them, with scales of its own choice, and rows as they come. With kv=fp8 it stores keys and
values in e4m3, with the attention kernels that it chooses for that. With tp=N as many GPUs share the model, by its own all-reduce and
NCCL's; NVLink multicast stays off, and what needs it. With pp=N its layers are cut into stages. $CASES names cases, by comma, in place of all,
balanced_N among them; $MAX_NUM_SEQS how many sequences are decoded together at most (256).

Greedy, end tokens ignored, prompts of fresh random tokens. tok_s of one stream counts decoding only; itl_ms of many is the whole
time less that of as many prefills, by completion token, as stoker-bench counts it. `start` is until the engine is ready.
"""

import asyncio
import json
import math
import os
import statistics
import sys
import time

STARTED = time.perf_counter()
for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
    os.environ.setdefault(name, "1")
for name in ("NCCL_NVLS_ENABLE", "VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_USE_NCCL_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"):
    os.environ.setdefault(name, "0")


# Of a vocabulary's size.
OPTIONS = {
    "qwen": lambda _: {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    "penalties": lambda _: {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "min_p": lambda _: {"temperature": 1.0, "min_p": 0.05},
    "bias300": lambda size: {"temperature": 0.0, "logit_bias": {i * (size // 300): float(i % 5 - 2) for i in range(300)}},
    "logprobs5": lambda _: {"temperature": 0.0, "logprobs": 5},
    "logprobs20": lambda _: {"temperature": 0.0, "logprobs": 20},
}


# Its fusion of all-reduce and norm is FlashInfer's, by NVLink multicast.
SEVERAL = {
    "distributed_executor_backend": "mp",
    "compilation_config": {"pass_config": {"enable_sp": False, "fuse_gemm_comms": False, "fuse_allreduce_rms": False}},
}


class Peer:
    def __init__(self, directory: str, quantization: str | None, kv_cache_dtype: str, n_ranks: int, n_stages: int, is_open: bool) -> None:
        import numpy
        import vllm

        with open(f"{directory}/config.json") as file:
            config = json.load(file)
        self.version = vllm.__version__
        self.vocab_size = config["vocab_size"]
        self.sampling = vllm.SamplingParams
        self.rng = numpy.random.default_rng(0)
        # The middle of the vocabulary: special tokens stand at its ends.
        self.vocabulary = (config["vocab_size"] // 128, config["vocab_size"] - config["vocab_size"] // 16)
        arguments = dict(
            model=directory,
            load_format="dummy",
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            skip_tokenizer_init=True,
            max_model_len=min(16384, config["max_position_embeddings"]),
            gpu_memory_utilization=0.88,
            enable_prefix_caching=True,
            max_num_seqs=int(os.environ.get("MAX_NUM_SEQS", "256")),
            disable_log_stats=True,
            tensor_parallel_size=n_ranks,
            pipeline_parallel_size=n_stages,
            **(SEVERAL if n_ranks * n_stages > 1 else {}),
        )
        if is_open:
            from vllm.v1.engine.async_llm import AsyncLLM

            self.llm = AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(**arguments))
        else:
            self.llm = vllm.LLM(**arguments)
        self.say("start", "seconds", [time.perf_counter() - STARTED])

    def say(self, case: str, metric: str, samples: list[float]) -> None:
        line = {"version": self.version, "case": case, "metric": metric, "samples": samples}
        print("SAMPLES " + json.dumps(line), flush=True)

    def tokens(self, n: int) -> list[int]:
        return self.rng.integers(*self.vocabulary, n).tolist()

    def fresh(self, requests: int, prompt: int, completion: int) -> float:
        return self.seconds([self.tokens(prompt) for _ in range(requests)], completion)

    def after(self, prefix: list[int], requests: int, completion: int) -> float:
        return self.seconds([prefix + self.tokens(128) for _ in range(requests)], completion)

    def seconds(self, prompts: list[list[int]], completion: int, options: dict | None = None) -> float:
        options = options or {"temperature": 0.0}
        sampling = self.sampling(max_tokens=completion, ignore_eos=True, detokenize=False, **options)
        begun = time.perf_counter()
        answers = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        elapsed = time.perf_counter() - begun
        if any(len(answer.outputs[0].token_ids) != completion for answer in answers):
            raise RuntimeError(f"an answer is shorter than {completion} tokens")
        return elapsed

    def ttft(self, prompt: int) -> None:
        self.say(f"ttft_{prompt}", "ttft_ms", [self.fresh(1, prompt, 1) * 1e3 for _ in range(5)])

    def single_stream(self) -> None:
        first = statistics.median(self.fresh(1, 128, 1) for _ in range(3))
        itl = [(self.fresh(1, 128, 256) - first) / 255 for _ in range(3)]
        self.say("single_stream", "tok_s", [1 / seconds for seconds in itl])
        self.say("single_stream", "itl_ms", [seconds * 1e3 for seconds in itl])

    def concurrent(self, requests: int) -> None:
        prefill = self.fresh(requests, 512, 1)
        whole = [self.fresh(requests, 512, 256) for _ in range(3)]
        self.say(f"concurrent_{requests}", "tok_s", [requests * 256 / seconds for seconds in whole])
        self.say(f"concurrent_{requests}", "itl_ms", [(seconds - prefill) / 255 * 1e3 for seconds in whole])

    def sampled(self, kind: str, requests: int) -> None:
        options = OPTIONS[kind](self.vocab_size)
        prompts = lambda: [self.tokens(512) for _ in range(requests)]  # noqa: E731
        self.seconds(prompts(), 8, options)
        samples = [(self.seconds(prompts(), 256), self.seconds(prompts(), 256, options)) for _ in range(1 if requests > 64 else 2)]
        self.say(f"sampled_{kind}_{requests}", "tok_s", [requests * 256 / seconds for _, seconds in samples])
        self.say(f"sampled_{kind}_{requests}", "share_of_greedy", [greedy / seconds for greedy, seconds in samples])

    def prefixes(self) -> None:
        prefix = self.tokens(2048)
        self.after(prefix, 1, 1)
        shared, unshared = self.after(prefix, 64, 64), self.fresh(64, 2176, 64)
        self.say("shared_prefix", "gain", [unshared / shared])
        self.say("shared_prefix", "seconds", [shared])
        self.say("prefix_warm_2k", "ttft_ms", [self.after(prefix, 1, 1) * 1e3 for _ in range(3)])

    async def answers(self, name: str, arrivals: list[tuple[float, int, int]]) -> list[tuple[int, list[float]]]:
        """Prompt tokens of each request, and the moments of its answer's tokens since it was due."""
        requests = [(at, self.tokens(prompt), completion) for at, prompt, completion in arrivals]
        begun = time.perf_counter() + 1
        return await asyncio.gather(*(self.answer(f"{name}-{i}", begun + at, *rest) for i, (at, *rest) in enumerate(requests)))

    async def mix(self, name: str, arrivals: list[tuple[float, int, int]]) -> None:
        """Told as bench/src/mix.rs tells it."""
        answers = await self.answers(name, arrivals)
        gaps = [[b - a for a, b in zip(times, times[1:])] for _, times in answers]
        told = {
            "short_ttft": ([times[0] for prompt, times in answers if prompt <= 4000], {"p50": 0.5, "p95": 0.95}),
            "itl": ([gap for one in gaps for gap in one], {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}),
            "worst_gap": ([max(one) for one in gaps], {"p50": 0.5, "p95": 0.95}),
            "e2e": ([times[-1] for _, times in answers], {"p50": 0.5, "p95": 0.95}),
        }
        for metric, (values, shares) in told.items():
            values.sort()
            for word, share in shares.items():
                self.say(name, f"{metric}_{word}_ms", [values[max(1, math.ceil(share * len(values))) - 1] * 1e3])

    async def answer(self, request: str, due: float, prompt: list[int], completion: int) -> tuple[int, list[float]]:
        from vllm.sampling_params import RequestOutputKind

        sampling = self.sampling(
            max_tokens=completion, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        await asyncio.sleep(due - time.perf_counter())
        times: list[float] = []
        async for output in self.llm.generate({"prompt_token_ids": prompt}, sampling, request):
            times += [time.perf_counter() - due] * len(output.outputs[0].token_ids)
        if len(times) != completion:
            raise RuntimeError(f"an answer has {len(times)} of {completion} tokens")
        return len(prompt), times

    def offline(self, case: str, requests: int, prompt: int, completion: int) -> None:
        seconds = self.fresh(requests, prompt, completion)
        self.say(case, "tok_s", [requests * completion / seconds])
        self.say(case, "seconds", [seconds])


async def open_loads(peer: Peer, directory: str) -> None:
    for rate in sorted(os.listdir(directory), key=int):
        with open(f"{directory}/{rate}") as file:
            lines = [line.split() for line in file]
        arrivals = [(float(at), int(prompt), int(completion)) for at, prompt, completion in lines]
        await peer.answers("warm-up", arrivals[:20])
        await peer.mix(f"mix_{rate}", arrivals)
    peer.llm.shutdown()


def main() -> None:
    number = lambda name: next((int(word[3:]) for word in sys.argv[2:] if word.startswith(f"{name}=")), 1)  # noqa: E731
    n_ranks, n_stages = number("tp"), number("pp")
    words = {"quick", "sampled", "mix", "fp8", "kv=fp8", f"tp={n_ranks}", f"pp={n_stages}"}
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= words:
        sys.exit(__doc__)
    quick = "quick" in sys.argv
    is_open = "mix" in sys.argv
    peer = Peer(sys.argv[1], "fp8" if "fp8" in sys.argv else None, "fp8" if "kv=fp8" in sys.argv else "auto", n_ranks, n_stages, is_open)
    if is_open:
        asyncio.run(open_loads(peer, os.environ["ARRIVALS"]))
        return
    peer.fresh(4, 128, 16)
    peer.fresh(64, 512, 32)
    if "sampled" in sys.argv:
        for requests in (64, 256):
            for kind in OPTIONS:
                peer.sampled(kind, requests)
        return
    cases = [(f"ttft_{prompt}", lambda prompt=prompt: peer.ttft(prompt)) for prompt in (128, 2048, 8192)]
    cases += [("single_stream", peer.single_stream)]
    at_once = (32, 256) if quick else (8, 32, 64, 128, 256)
    cases += [(f"concurrent_{requests}", lambda requests=requests: peer.concurrent(requests)) for requests in at_once]
    cases += [("prefixes", peer.prefixes)]
    cases += [] if quick else [("offline_1000", lambda: peer.offline("offline_1000", 1000, 512, 256))]
    wanted = [case for case in os.environ.get("CASES", "").split(",") if case]
    balanced = [case for case in wanted if case.startswith("balanced_")]
    cases += [(case, lambda case=case: peer.offline(case, int(case.removeprefix("balanced_")), 1024, 1024)) for case in balanced]
    for name, run in cases:
        if not wanted or name in wanted:
            run()


if __name__ == "__main__":
    main()
