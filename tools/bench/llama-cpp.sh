#!/usr/bin/env bash
# Builds llama.cpp once into the cache, for `stoker-bench run --peers llama.cpp`: llama-batched-bench and llama-quantize,
# native to this machine, and a Python with the gguf package. Prints the folder. About ten minutes on two cores.
#
#   tools/bench/llama-cpp.sh
#
# The source is the one inside the llama-cpp-python archive on PyPI, pinned by version and hash; its bindings are not used.
set -euo pipefail

VERSION=0.3.36
SHA256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
CACHE=${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker}
PEER=$CACHE/bench/peers/llama.cpp
PROGRAMS=(llama-batched-bench llama-quantize)

main() {
  if [ "$(cat "$PEER/done" 2>/dev/null)" != "$VERSION" ]; then
    for tool in cmake c++ python3; do
      command -v "$tool" >/dev/null || { echo "llama.cpp needs $tool to be built" >&2; exit 1; }
    done
    rm -rf "$PEER"; mkdir -p "$PEER"
    python_packages
    source_tree
    build
    echo "$VERSION" > "$PEER/done"
  fi
  echo "$PEER"
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
  cmake -S "$PEER/llama.cpp" -B "$PEER/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
    -DGGML_OPENMP=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_BUILD_TESTS=OFF > "$PEER/cmake.log"
  cmake --build "$PEER/build" --target "${PROGRAMS[@]}" -j "$(nproc)" > "$PEER/build.log" 2>&1 \
    || { tail -20 "$PEER/build.log" >&2; exit 1; }
  mkdir "$PEER/bin"
  cp "${PROGRAMS[@]/#/$PEER/build/bin/}" "$PEER/bin/"
  rm -rf "$PEER/build"
}

main
