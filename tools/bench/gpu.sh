#!/usr/bin/env bash
# The engine and vLLM on one GPU in one run: ours, vLLM, ours again, then the ratios. Weights are random, of a named shape.
#
#   tools/bench/gpu.sh                  the quick sweep, about five minutes
#   FULL=1 tools/bench/gpu.sh           every case, and an agent's start, memory and HTTP: about ten
#
# By environment:
#   BENCH, AGENT   the stoker-bench and stoker-agent to run (default: built here, release; BENCH alone: no agent)
#   VSITE          folder with an unpacked vLLM, or
#   VSITE_ARCHIVE  its archive (.tar.xz); neither: vLLM is python3's own
#   MODEL          a named shape (default llama-3.1-8b), or a directory with a config.json
#   SAMPLED        1: the cases with sampling options, of both, in place of a sweep
#   MIX            requests a second, several by blanks: open loads of short and long prompts, of both, in place of a sweep
#   CASES          cases of ours, by comma, in place of a sweep
#   QUANTIZATION   fp8: both systems quantise the weights when they load them; int4, fp8-blocks: both take random
#                  ones in AWQ's form, or in e4m3 in blocks of 128 x 128
#   KV_CACHE_DTYPE fp8: both systems store keys and values in it
#   TENSOR_PARALLEL  GPUs that share the model, in both systems (default 1)
#   PIPELINE_PARALLEL  stages that its layers are cut into, in both systems (default 1)
#   MAX_NUM_SEQS   sequences decoded together at most, in both systems (default 256)
#   ITL_TARGET_MS  milliseconds between two tokens that prompts of others may take, in ours: 10000 for throughput alone; vLLM has no such bound
#   SAMPLES        samples of each in the full sweep, each time it runs (default 3)
#   OURS_LIMIT, VLLM_LIMIT  seconds that a run of ours (180) and of vLLM (200) may take, its start among them: a model of 70B on two GPUs needs more
#   OUT            folder for logs and figures (default: a fresh temporary one)
#   STOKER_COMMIT  what to note as commit where no checkout came along
#
# $OUT/gpu.jsonl holds all figures: append it to docs/benchmarks/results/gpu.jsonl. Without vLLM, ours are measured alone.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
MODEL=${MODEL:-llama-3.1-8b}
OUT=$(mkdir -p "${OUT:=$(mktemp -d)}" && cd "$OUT" && pwd)
RUN=$(date -u +%Y-%m-%dT%H:%M)-gpu-$$
export STOKER_CACHE=${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker} PYTHONUNBUFFERED=1

FULL_CASES=ttft_128,ttft_2048,ttft_8192,single_stream,concurrent_8,concurrent_32,concurrent_64,concurrent_128,concurrent_256
SAMPLED_CASES=$(printf 'sampled_%s,' {qwen,penalties,min_p,bias300,logprobs5,logprobs20}_{64,256} | sed 's/,$//')
FULL_CASES+=,prefix_warm_2k,shared_prefix,offline_1000

main() {
  cd "$ROOT"
  if [ -n "${MIX:-}" ]; then SWEEP=(--samples "${SAMPLES:-1}" --cases "$(printf 'mix_%s\n' $MIX | paste -sd,)") QUICK=(mix)
  elif [ "${SAMPLED:-0}" = 1 ]; then SWEEP=(--samples "${SAMPLES:-3}" --cases "${CASES:-$SAMPLED_CASES}") QUICK=(sampled)
  elif [ "${FULL:-0}" = 1 ]; then SWEEP=(--samples "${SAMPLES:-3}" --cases "${CASES:-$FULL_CASES}") QUICK=(); else
    SWEEP=(--quick ${CASES:+--cases "$CASES"}) QUICK=(quick)
  fi
  program
  rm -f "$OUT"/{ours-1,vllm,ours-2,agent,gpu}.jsonl
  ours ours-1
  if vllm; then
    ours ours-2
    "$BENCH" join "$OUT"/{ours-1,vllm,ours-2}.jsonl --out "$OUT/gpu.jsonl" | grep -E '^case|ratio_to_' || true
  else
    echo "skipped: vLLM: it did not run; the end of its log:" >&2
    tail -5 "$OUT/vllm.log" >&2
    cp "$OUT/ours-1.jsonl" "$OUT/gpu.jsonl"
  fi
  [ "${FULL:-0}" = 0 ] || agent
  echo "figures: $OUT/gpu.jsonl"
}

program() {
  if [ -z "${BENCH:-}" ]; then
    cargo build --release --bin stoker-bench --bin stoker-agent
    BENCH=${CARGO_TARGET_DIR:-$STOKER_CACHE/target}/release/stoker-bench AGENT=${BENCH%bench}agent
  fi
}

# Whoever ran before gives its memory back some seconds after its end: a KV cache made meanwhile is a smaller one.
free_memory() {
  local used
  for _ in $(seq 30); do
    # Without the tool nobody knows, and nobody waits.
    used=$(nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits 2> /dev/null | sort -n | tail -1) || return 0
    [ "${used:-0}" -ge 2048 ] || return 0
    sleep 1
  done
  echo "a GPU still has $used MiB in use: figures that follow are of what is left" >&2
}

ours() {
  echo "== stoker, $1"
  free_memory
  timeout "${OURS_LIMIT:-180}" "$BENCH" run --model "$MODEL" --device "${DEVICE:-cuda:0}" --weights "${WEIGHTS:-device}" "${SWEEP[@]}" \
    ${QUANTIZATION:+--quantization "$QUANTIZATION"} ${KV_CACHE_DTYPE:+--kv-cache-dtype "$KV_CACHE_DTYPE"} --tensor-parallel "${TENSOR_PARALLEL:-1}" --pipeline-parallel "${PIPELINE_PARALLEL:-1}" \
    ${MAX_NUM_SEQS:+--max-num-seqs "$MAX_NUM_SEQS"} ${ITL_TARGET_MS:+--itl-target-ms "$ITL_TARGET_MS"} --run "$RUN" --out "$OUT/$1.jsonl" 2> "$OUT/$1.log" || { tail -5 "$OUT/$1.log" >&2; return 1; }
}

# A whole agent, which reads its weights from disk: written once, then in the page cache.
agent() {
  [ -n "${AGENT:-}" ] || { echo "skipped: start, idle, http_256: AGENT names no stoker-agent" >&2; return 0; }
  echo "== stoker-agent"
  timeout "${AGENT_LIMIT:-180}" "$BENCH" run --model "$MODEL" --device "${DEVICE:-cuda:0}" --weights disk --samples "${SAMPLES:-3}" \
    --cases start,idle,http_256 --agent "$AGENT" --run "$RUN" --out "$OUT/agent.jsonl" 2> "$OUT/agent.log" \
    || { tail -5 "$OUT/agent.log" >&2; return 1; }
  cat "$OUT/agent.jsonl" >> "$OUT/gpu.jsonl"
}

# Its own words go to a log. A part of its cases is better than none: the lines it got to are taken in.
vllm() {
  echo "== vLLM"
  site
  free_memory
  local config=$MODEL
  for rate in ${MIX:-}; do
    mkdir -p "$OUT/arrivals"
    "$BENCH" arrivals "$rate" > "$OUT/arrivals/$rate"
  done
  # What is stored quantised its description says.
  local stored=() made=()
  case ${QUANTIZATION:-} in int4 | fp8-blocks) stored=(--quantization "$QUANTIZATION") ;; ?*) made=("$QUANTIZATION") ;; esac
  [ -d "$MODEL" ] || config=$("$BENCH" checkpoint "$MODEL" --without-weights "${stored[@]}")
  ARRIVALS=$OUT/arrivals MAX_NUM_SEQS=${MAX_NUM_SEQS:-256} timeout "${VLLM_LIMIT:-200}" python3 tools/bench/vllm-peer.py "$config" "${QUICK[@]}" "${made[@]}" \
    ${KV_CACHE_DTYPE:+"kv=$KV_CACHE_DTYPE"} ${TENSOR_PARALLEL:+"tp=$TENSOR_PARALLEL"} ${PIPELINE_PARALLEL:+"pp=$PIPELINE_PARALLEL"} > "$OUT/vllm.log" 2>&1 \
    || echo "vLLM ended early: $OUT/vllm.log" >&2
  # As stoker-bench calls it.
  local gpus=${TENSOR_PARALLEL:+, $TENSOR_PARALLEL GPUs} ranks=${TENSOR_PARALLEL:-1}
  [ -z "${PIPELINE_PARALLEL:-}" ] || gpus=", $PIPELINE_PARALLEL stages of $ranks GPU$([ "$ranks" = 1 ] || echo s)"
  local format=${QUANTIZATION:-bf16}${KV_CACHE_DTYPE:+, $KV_CACHE_DTYPE KV}$gpus
  "$BENCH" peer vllm "$OUT/vllm.log" --run "$RUN" --model "$(basename "$MODEL")" --dtype "$format" --command "make bench-gpu" --out "$OUT/vllm.jsonl"
}

site() {
  if [ -z "${VSITE:-}" ] && [ -n "${VSITE_ARCHIVE:-}" ]; then
    VSITE=$(mktemp -d)
    tar xJf "$VSITE_ARCHIVE" -C "$VSITE"
  fi
  [ -z "${VSITE:-}" ] || export PYTHONPATH=$VSITE${PYTHONPATH:+:$PYTHONPATH}
}

main
