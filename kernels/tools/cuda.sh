#!/usr/bin/env bash
# Installs the CUDA compiler that builds our kernels into the per-user cache: pinned wheels of nvcc, about 104 MB, no
# root, no GPU, no driver. `kernels/build.rs` finds it there. Running it again costs nothing; DIR is removed to redo it.
set -euo pipefail

cache="${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker}"
dir="$cache/cuda"
# All parts pinned: nvcc's own wheel leaves the others open, and PTX of a newer compiler does not load on an older driver.
packages=(
  nvidia-cuda-nvcc==13.0.88
  nvidia-cuda-crt==13.0.88
  nvidia-nvvm==13.0.88
  nvidia-cuda-runtime==13.0.96
  nvidia-cuda-cccl==13.0.85
)
stamp="$dir/installed"

if [[ -f "$stamp" && "$(cat "$stamp")" == "${packages[*]}" ]]; then
  echo "CUDA compiler is in $dir"
  exit 0
fi
command -v python3 >/dev/null || { echo "cuda.sh needs python3 with pip to fetch the compiler's wheels" >&2; exit 1; }

mkdir -p "$cache"
fresh="$(mktemp -d "$cache/cuda.XXXXXX")"
trap 'rm -rf "$fresh"' EXIT
echo "installing the CUDA compiler into $dir"
python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$fresh" "${packages[@]}"
"$fresh/nvidia/cu13/bin/nvcc" --version | tail -n 2
echo "${packages[*]}" >"$fresh/installed"
rm -rf "$dir"
mv "$fresh" "$dir"
trap - EXIT
# Builds made without the compiler do not look for it again by themselves.
touch "$(dirname "$0")/../build.rs"
