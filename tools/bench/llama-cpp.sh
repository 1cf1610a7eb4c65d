#!/usr/bin/env bash
# Builds llama.cpp once into the cache, for `stoker-bench run --peers llama.cpp`: llama-batched-bench and llama-quantize,
# native to this machine, and a Python with the gguf package. Prints their folder. About ten minutes on two cores.
#
#   tools/bench/llama-cpp.sh
#
# With the name of an instruction set it builds for no more than that one, which `stoker-bench run --isa NAME` is measured beside:
#
#   tools/bench/llama-cpp.sh avx2
#
# The source is the one inside the llama-cpp-python archive on PyPI, pinned by version and hash; its bindings are not used.
set -euo pipefail

VERSION=0.3.36
SHA256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
CACHE=${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker}
PEER=$CACHE/bench/peers/llama.cpp
PROGRAMS=(llama-batched-bench llama-quantize)
ISA=${1:-native}
BIN=$PEER/bin-$ISA

main() {
  local set; set=$(instruction_set)
  if [ "$(cat "$PEER/source" 2>/dev/null)" != "$VERSION" ]; then
    for tool in cmake c++ python3; do
      command -v "$tool" >/dev/null || { echo "llama.cpp needs $tool to be built" >&2; exit 1; }
    done
    rm -rf "$PEER"; mkdir -p "$PEER"
    python_packages
    source_tree
    echo "$VERSION" > "$PEER/source"
  fi
  [ -f "$BIN/version" ] || build $set
  echo "$BIN"
}

# Its own switches for each of our sets; the compiler gets no other.
instruction_set() {
  local avx2="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
  case $ISA in
    native) echo "-DGGML_NATIVE=ON" ;;
    avx2) echo "$avx2" ;;
    avx2-vnni) echo "$avx2 -DGGML_AVX_VNNI=ON" ;;
    avx512) echo "$avx2 -DGGML_AVX512=ON" ;;
    avx512-vnni) echo "$avx2 -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON" ;;
    avx512-bf16) echo "$avx2 -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON" ;;
    amx) echo "$avx2 -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AMX_TILE=ON -DGGML_AMX_INT8=ON -DGGML_AMX_BF16=ON" ;;
    *) echo "no llama.cpp is built for $ISA: take native, avx2, avx2-vnni, avx512, avx512-vnni, avx512-bf16 or amx" >&2; exit 1 ;;
  esac
}

# pip asks the build tool for the archive's metadata even when it only downloads; isolation would build cmake itself.
python_packages() {
  python3 -m venv "$PEER/venv"
  "$PEER/venv/bin/pip" install -q --disable-pip-version-check \
    scikit-build-core==0.12.2 numpy==2.4.6 gguf==0.19.0
}

source_tree() {
  local archive=$PEER/llama_cpp_python-$VERSION.tar.gz
  "$PEER/venv/bin/pip" download -q --disable-pip-version-check --dest "$PEER" --no-deps --no-build-isolation \
    --no-binary llama-cpp-python "llama-cpp-python==$VERSION"
  echo "$SHA256  $archive" | sha256sum --check --quiet
  tar xzf "$archive" -C "$PEER" --strip-components=2 "llama_cpp_python-$VERSION/vendor/llama.cpp"
  rm "$archive"
}

build() {
  rm -rf "$PEER/build" "$BIN"
  cmake -S "$PEER/llama.cpp" -B "$PEER/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF "$@" \
    -DGGML_OPENMP=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF > "$PEER/cmake.log"
  cmake --build "$PEER/build" --target "${PROGRAMS[@]}" -j "$(nproc)" > "$PEER/build.log" 2>&1 \
    || { tail -20 "$PEER/build.log" >&2; exit 1; }
  mkdir "$BIN"
  cp "${PROGRAMS[@]/#/$PEER/build/bin/}" "$BIN/"
  rm -rf "$PEER/build"
  echo "$VERSION" > "$BIN/version"
}

main
