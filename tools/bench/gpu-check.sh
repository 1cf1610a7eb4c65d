#!/usr/bin/env bash
# What only a machine with a GPU can check: each kernel beside its reference, the engine beside transformers and the CPU,
# batch invariance, a GPU that fails, and NVIDIA's memory and race checkers over the kernel checks.
#
#   tools/bench/gpu-check.sh            everything, some minutes: the race checker takes most of them, its groups run side by side
#
# By environment:
#   BINARIES   folder with kernel-check, engine-tests and gpu-fault- and gpu-rank-fault-tests, built elsewhere (default: built here, release)
#   SANITIZER  the compute-sanitizer to use (default: the one on PATH, else NVIDIA's wheel, fetched into the cache)
#   ONLY       some of: kernels engine memcheck racecheck
#   OUT        folder for logs (default: a fresh temporary one)
#
# Exits with 1 if anything is wrong; a program that skipped all of its tests has checked nothing and is wrong. A step that cannot run
# here says `skipped: STEP: reason`.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
OUT=$(mkdir -p "${OUT:=$(mktemp -d)}" && cd "$OUT" && pwd)
ONLY=${ONLY:-kernels engine memcheck racecheck}
CACHE=${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker}
SANITIZER_WHEEL=nvidia-cuda-sanitizer-api==13.0.85
FAILED=()

main() {
  cd "$ROOT"
  nvidia-smi -L > /dev/null 2>&1 || { echo "skipped: gpu-check: no NVIDIA driver on this machine"; exit 0; }
  [ -n "${BINARIES:-}" ] || build
  for step in $ONLY; do "$step"; done
  [ "${#FAILED[@]}" = 0 ] || { echo "wrong: ${FAILED[*]}; logs: $OUT"; exit 1; }
  echo "all of: $ONLY; logs: $OUT"
}

build() {
  BINARIES=$OUT/bin
  mkdir -p "$BINARIES"
  cargo build --release --bin kernel-check
  cp "${CARGO_TARGET_DIR:-$CACHE/target}/release/kernel-check" "$BINARIES/"
  test_program engine engine-tests
  test_program gpu_fault gpu-fault-tests
  test_program gpu_rank_fault gpu-rank-fault-tests
}

# Copies the program of one test target of the engine.
test_program() {
  local built
  built=$(cargo test --release -p stoker-engine --test "$1" --no-run --message-format=json \
    | sed -n "s/.*\"name\":\"$1\".*\"executable\":\"\([^\"]*\)\".*/\1/p" | tail -1)
  cp "$built" "$BINARIES/$2"
}

# Runs a command under a name, its words in a log, and what its tests skipped in another.
run() {
  local name=$1 started=$SECONDS code=0
  shift
  : > "$OUT/$name.skipped"
  SKIP_LOG="$OUT/$name.skipped" "$@" > "$OUT/$name.log" 2>&1 || code=$?
  echo "$code $((SECONDS - started))" > "$OUT/$name.end"
}

# Whether as many tests were skipped as passed.
checked_nothing() {
  local passed skipped
  passed=$(awk '/^test result: ok/ { n += $4 } END { print n + 0 }' "$OUT/$1.log")
  skipped=$({ cat "$OUT/$1.skipped"; grep '^skipped:' "$OUT/$1.log" || true; } | sort -u | wc -l)
  [ "$skipped" -gt 0 ] && [ "$skipped" -ge "$passed" ]
}

# Shows the lines of its log that match, and remembers that it failed.
report() {
  local name=$1 shown=$2 code seconds verdict=ok
  read -r code seconds < "$OUT/$name.end"
  if [ "$code" = 0 ] && checked_nothing "$name"; then code="all skipped"; fi
  [ "$code" = 0 ] || { verdict="WRONG ($code)"; FAILED+=("$name"); }
  echo "== $name: $verdict, $seconds s"
  grep -E "$shown" "$OUT/$name.log" | tail -20 || tail -5 "$OUT/$name.log"
}

step() {
  local name=$1 shown=$2
  shift 2
  run "$name" "$@"
  report "$name" "$shown"
}

kernels() { step kernels 'agree|WRONG' "$BINARIES/kernel-check"; }

engine() {
  step engine '^test result|FAILED|panicked|skipped' "$BINARIES/engine-tests" cuda --test-threads 1
  step gpu-fault '^test result|FAILED|panicked|skipped' "$BINARIES/gpu-fault-tests"
  [ "$(nvidia-smi -L | wc -l)" -gt 1 ] || { echo "skipped: gpu-rank-fault: one GPU"; return 0; }
  step gpu-rank-fault '^test result|FAILED|panicked|skipped' "$BINARIES/gpu-rank-fault-tests"
}

memcheck() { sanitize memcheck '' pointwise linear gated residual invariance attention sampling packed program; }

# The race checker follows shared memory only and is some hundred times slower: the small vocabulary stands for sampling, and
# the thousand products of `invariance` are left to the memory checker.
racecheck() { sanitize racecheck '--racecheck-report all' pointwise linear gated residual attention-decode attention-prefill sampling-small; }

sanitize() {
  local tool=$1 options=$2
  shift 2
  find_sanitizer || { echo "skipped: $tool: no compute-sanitizer, and its wheel cannot be fetched"; return 0; }
  local group
  for group in "$@"; do
    # shellcheck disable=SC2046,SC2086 # options are words
    run "$tool-$group" "$SANITIZER" --tool "$tool" $options --error-exitcode 9 $(checking "$group") &
  done
  wait
  for group in "$@"; do
    report "$tool-$group" 'ERROR SUMMARY|RACECHECK SUMMARY|=========     (at|Error|Invalid)|WRONG'
  done
}

# The program and its words that run a group: of kernels by themselves, or the program of a step.
checking() {
  case $1 in
    program) echo "$BINARIES/engine-tests" cuda::a_recorded_step ;;
    *) echo "$BINARIES/kernel-check" --only "$1" ;;
  esac
}

find_sanitizer() {
  [ -n "${SANITIZER:-}" ] && return 0
  if command -v compute-sanitizer > /dev/null; then SANITIZER=compute-sanitizer; return 0; fi
  local site=$CACHE/sanitizer
  [ -d "$site" ] || python3 -m pip install -q --no-deps --target "$site" "$SANITIZER_WHEEL" || return 1
  SANITIZER=$(find "$site" -name compute-sanitizer -type f | head -1)
  [ -n "$SANITIZER" ]
}

main
