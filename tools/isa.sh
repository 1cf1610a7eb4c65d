#!/usr/bin/env bash
# The CPU back end on every instruction set that can be had here: kernels against references, goldens of transformers, the same
# bits alone and in company. First those of this machine but its best, on which `make test` does the same and more, each forced by
# STOKER_CPU_ISA; then those of 64-bit Arm, cross-compiled and run under qemu, which says whether results are right and nothing of
# their speed.
#
#   tools/isa.sh            # what `make isa-check` runs
#   tools/isa.sh x86_64     # or aarch64: one of the two
#
# What is missing for Arm is told and counted as skipped: a cross linker, qemu, the compiler's library.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

TARGET=aarch64-unknown-linux-gnu
# Tests that compute. Others of the engine are the same whatever computes.
GOLDENS=(goldens:: families:: quantised:: gguf::)
TESTS=("${GOLDENS[@]}" embeddings:: batch_invariance:: prefix:: scores::)

main() {
  case ${1:-all} in
    x86_64) on_this_machine ;;
    aarch64) on_arm ;;
    all) on_this_machine; on_arm ;;
    *) echo "no sets of $1: take x86_64 or aarch64" >&2; exit 1 ;;
  esac
}

on_this_machine() {
  local isa all
  # By itself, so that a failure ends this.
  all=$(sets)
  # Without -p: what `make test` built.
  for isa in $(tail -n +2 <<<"$all"); do
    echo "== $isa"
    STOKER_CPU_ISA=$isa cargo test -q --test engine -- "${TESTS[@]}"
  done
}

on_arm() {
  local reason; reason=$(missing)
  if [ -n "$reason" ]; then
    echo "skipped: isa_check_aarch64: $reason" | tee -a "${SKIP_LOG:-/dev/null}"
    return
  fi
  export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
  export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu"
  export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
  echo "== kernels of aarch64"
  cargo test -q --target $TARGET -p stoker-engine --lib -- ops::
  cargo test -q --target $TARGET -p stoker-engine --test engine -- kernel_paths::
  # Plain Rust is the same as on this machine, and an emulator is slow: goldens only.
  local isa all
  all=$(sets --target $TARGET -p stoker-engine | grep neon)
  for isa in $all; do
    echo "== $isa"
    STOKER_CPU_ISA=$isa cargo test -q --target $TARGET -p stoker-engine --test engine -- "${GOLDENS[@]}"
  done
}

# The instruction sets there, as the engine names them.
sets() {
  cargo run -q "$@" --example cpu_sets
}

# What Arm needs and is not here.
missing() {
  command -v qemu-aarch64-static >/dev/null || { echo "no qemu-aarch64-static (qemu-user-static)"; return; }
  command -v aarch64-linux-gnu-gcc >/dev/null || { echo "no aarch64-linux-gnu-gcc (gcc-aarch64-linux-gnu, libc6-dev-arm64-cross)"; return; }
  rustup target add $TARGET >/dev/null 2>&1 || echo "rustup has no $TARGET"
}

main "$@"
