#!/usr/bin/env bash
# Packs the demo on GPUs for a machine that has GPUs and neither compilers nor a network: our programs, Kubernetes' as one,
# the chart and the examples.
#
#   tools/cluster/carry.sh ARCHIVE        there: tar -xJf ARCHIVE && ./demo-gpu.sh [--model DIR]
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
CACHE=${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker}
RELEASE=${CARGO_TARGET_DIR:-$CACHE/target}/release

[ $# = 1 ] || { sed -n '2,5s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
cd "$ROOT"
"$ROOT/tools/kube/build.sh" kube-all
cargo build --release --bin stoker-agent --bin stoker-operator --bin stoker-gateway --bin stoker-cluster --bin stoker-load
cargo build --release -p stoker-gpu-fault
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
mkdir "$FOLDER/kube"
cp "$("$ROOT/tools/kube/build.sh" --where kube-all)" "$FOLDER/kube/kube-all"
for name in etcd kube-apiserver kube-controller-manager kube-scheduler kubectl; do ln -s kube-all "$FOLDER/kube/$name"; done
cp -r charts examples "$FOLDER/"
cp "$RELEASE"/{stoker-agent,stoker-operator,stoker-gateway,stoker-cluster,stoker-load,libstoker_gpu_fault.so} "$FOLDER/"
strip "$FOLDER"/stoker-* "$FOLDER/libstoker_gpu_fault.so"
cat > "$FOLDER/demo-gpu.sh" << 'RUN'
#!/bin/sh
here=$(cd "$(dirname "$0")" && pwd)
KUBEBUILDER_ASSETS=$here/kube exec "$here/stoker-cluster" demo-gpu --dir "$here/demo" --source "$here" --agent "$here/stoker-agent" \
  --operator "$here/stoker-operator" --gateway "$here/stoker-gateway" --load "$here/stoker-load" --fault "$here/libstoker_gpu_fault.so" "$@"
RUN
chmod +x "$FOLDER/demo-gpu.sh"
# Programs have most of their code and kernels in common: found only by a dictionary that holds them all.
tar -C "$FOLDER" -cf - . | xz -T1 --lzma2=preset=6,dict=256MiB > "$1"
ls -l "$1"
