#!/usr/bin/env bash
# Stoker on a real kubelet + containerd node, in namespaces that leave nothing behind. Needs root, else it skips.
#
#   tools/e2e/run.sh                    build everything, then the whole walk: install, serve, roll, scale, guard, explain, delete
#   tools/e2e/run.sh node               only the node with the images; says how to enter it; until Ctrl-C
#   tools/e2e/run.sh docs               every command of docs/install.md, in a node of its own
#   tools/e2e/run.sh exec -- CMD...     one command in a node of its own, with kubectl and helm on PATH
#
# Binaries, images and the logs of the last run lie in ${STOKER_CACHE:-${XDG_CACHE_HOME:-~/.cache}/stoker}.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export STOKER_CACHE=${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker}
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$STOKER_CACHE/target}
RELEASE=$CARGO_TARGET_DIR/release
IMAGES=$STOKER_CACHE/e2e/images
LOGS=$STOKER_CACHE/e2e/logs
IMAGE_NAMES=(stoker-agent stoker-operator stoker-gateway e2e-tools e2e-model)

main() {
  case ${1:-} in -h | --help) usage; return ;; esac
  local word=${1:-run}; [ $# -eq 0 ] || shift
  [ "$(id -u)" = 0 ] || { echo "skipped: e2e: a node of its own needs root (namespaces, cgroups, overlay mounts)"; return; }
  cd "$ROOT"
  system_packages
  kubernetes
  programs
  images
  case $word in
    docs) start exec -- tools/e2e/docs.sh docs/install.md ;;
    *) start "$word" "$@" ;;
  esac
}

usage() { sed -n '2,/^set -euo/p' "${BASH_SOURCE[0]}" | sed -n 's/^# \{0,1\}//p'; }

# What Debian has and we do not build. Elsewhere, stoker-e2e says what is missing and skips.
system_packages() {
  local pair missing=()
  for pair in runc:runc nft:nftables iptables:iptables ipset:ipset ip:iproute2 curl:curl unshare:util-linux sysctl:procps; do
    command -v "${pair%%:*}" > /dev/null || missing+=("${pair##*:}")
  done
  [ -x /usr/lib/cni/bridge ] || missing+=(containernetworking-plugins)
  [ -f /etc/ssl/certs/ca-certificates.crt ] || missing+=(ca-certificates)
  [ "${#missing[@]}" -gt 0 ] && command -v apt-get > /dev/null || return 0
  echo "installing ${missing[*]}"
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}"; } \
    > /dev/null || { echo "cannot install ${missing[*]}; install them, then run again" >&2; exit 1; }
}

kubernetes() {
  tools/kube/build.sh etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl helm containerd coredns kube-router
}

# As the Makefile does it: what `make demo` built is found.
programs() { cargo build --release --bin stoker-agent --bin stoker-operator --bin stoker-gateway --bin stoker-image --bin kubectl-stoker --bin stoker-e2e; }

images() {
  mkdir -p "$IMAGES"
  local name
  for name in "${IMAGE_NAMES[@]}"; do
    "$RELEASE/stoker-image" "tools/image/recipes/$name.yaml" --set BIN_DIR="$RELEASE" --set MODEL_DIR="$ROOT/models/ember" \
      --tag "localhost/${name/#e2e-/stoker-e2e-}:dev" --out "$IMAGES/$name.tar"
  done
}

start() { # WORD ARGS...
  local word=$1 name args=(); shift
  for name in "${IMAGE_NAMES[@]}"; do args+=(--image "$IMAGES/$name.tar"); done
  rm -rf "$LOGS"
  exec "$RELEASE/stoker-e2e" "$word" --kube-bin "$(dirname "$(built kubelet)")" --helm "$(built helm)" \
    --containerd-bin "$(dirname "$(built containerd)")" --coredns "$(built coredns)" --kube-router "$(built kube-router)" \
    --plugin "$RELEASE/kubectl-stoker" --chart "$ROOT/charts/stoker" --logs "$LOGS" "${args[@]}" "$@"
}

built() { tools/kube/build.sh --where "$1"; }

main "$@"
