#!/usr/bin/env bash
# Makes what `kubectl krew` installs `kubectl stoker` from: an archive with the program, and the plugin's manifest.
#
#   tools/krew.sh PROGRAM URL DIR      PROGRAM of this machine into DIR: kubectl-stoker-OS-ARCH.tar.gz, and stoker.yaml, which says
#                                      that the archives of DIR are at URL, each with its SHA-256
#   tools/krew.sh --check DIR          krew installs the plugin from DIR and it says its version, if krew can be built (it needs Go)
#
# Run once on each kind of machine into the same DIR, the manifest names all archives that are there.
# STOKER_CACHE=DIR  where krew is kept (default: ${XDG_CACHE_HOME:-~/.cache}/stoker)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

KREW_VERSION=v0.5.0
CACHE=${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker}

main() {
  case ${1:-} in
    --check) [ $# -eq 2 ] || die "--check takes one directory"; check "$2" ;;
    "" | -*) sed -n '2,/^set -euo/p' "${BASH_SOURCE[0]}" | sed -n 's/^# \{0,1\}//p' ;;
    *) [ $# -eq 3 ] || die "PROGRAM URL DIR"; make "$1" "${2%/}" "$3" ;;
  esac
}

die() { echo "krew.sh: $*" >&2; exit 1; }

make() {
  local program=$1 url=$2 dir=$3
  [ -x "$program" ] || die "$program is no program: cargo build --release -p stoker-cli makes it"
  mkdir -p "$dir"
  archive "$program" "$dir/kubectl-stoker-$(os)-$(arch).tar.gz"
  manifest "$url" "$dir" > "$dir/stoker.yaml"
}

os() { uname -s | tr '[:upper:]' '[:lower:]'; }
arch() { case $(uname -m) in x86_64) echo amd64 ;; aarch64 | arm64) echo arm64 ;; *) die "krew knows no $(uname -m)" ;; esac; }

# The same program makes the same archive, so that a manifest that was published stays right.
archive() {
  tar --sort=name --owner=0 --group=0 --numeric-owner --mtime=@0 --mode=755 \
    --transform='s,.*/,,' -cf - -C / "$(realpath "$1" | sed 's,^/,,')" | gzip -n > "$2"
}

version() { sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1; }

manifest() {
  cat <<END
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: stoker
spec:
  version: v$(version)
  shortDescription: Serve language models on your own GPUs
  description: |
    For InferenceDeployments of Stoker's operator: status, top, logs and events of all replicas, whether a model fits before
    anything is scheduled, how a change goes and undoing it, and why there are that many replicas.
  caveats: |
    It needs Stoker's operator in the cluster, but for "plan", "simulate" and "explain --file".
  platforms:
END
  local file
  for file in "$2"/kubectl-stoker-*-*.tar.gz; do platform "$1" "$file"; done
}

platform() {
  local name=${2##*/} kind
  kind=${name#kubectl-stoker-}
  kind=${kind%.tar.gz}
  cat <<END
  - selector: {matchLabels: {os: ${kind%-*}, arch: ${kind##*-}}}
    uri: $1/$name
    sha256: "$(sha256sum "$2" | cut -d" " -f1)"
    bin: kubectl-stoker
END
}

check() {
  local dir krew
  dir=$(realpath "$1")
  krew=$(krew) || { echo "skipped: krew cannot be built here"; return; }
  KREW_ROOT=$(mktemp -d)
  export KREW_ROOT
  trap 'rm -rf "$KREW_ROOT"' EXIT
  "$krew" install --manifest="$dir/stoker.yaml" --archive="$dir/kubectl-stoker-$(os)-$(arch).tar.gz" </dev/null >&2
  "$KREW_ROOT/bin/kubectl-stoker" --version
}

# Built by Go's own proxy; where it is, on standard output.
krew() {
  local krew=$CACHE/krew-$KREW_VERSION/krew
  [ -x "$krew" ] || GOBIN=$CACHE/krew-$KREW_VERSION go install "sigs.k8s.io/krew/cmd/krew@$KREW_VERSION" >&2 || return 1
  echo "$krew"
}

main "$@"
