#!/usr/bin/env bash
# Fetches Prometheus and promtool, once, as Debian packages them, into the per-user cache. Installs nothing on the machine.
#
#   tools/prometheus.sh                fetch them if they are not there
#   tools/prometheus.sh --where NAME   print where NAME (prometheus, promtool) is, or will be
#
# STOKER_CACHE=DIR  the cache (default: ${XDG_CACHE_HOME:-~/.cache}/stoker)
set -euo pipefail

CACHE=${STOKER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/stoker}
DIR=$CACHE/prometheus

main() {
  case ${1:-} in
    "") [ -x "$DIR/usr/bin/promtool" ] || fetch ;;
    --where) [ $# -eq 2 ] || die "--where takes one name"; echo "$DIR/usr/bin/$2" ;;
    *) sed -n '2,/^set -euo/p' "${BASH_SOURCE[0]}" | sed -n 's/^# \{0,1\}//p' ;;
  esac
}

die() { echo "prometheus.sh: $*" >&2; exit 1; }

fetch() {
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || die "no apt-get and dpkg-deb: this needs Debian or its like"
  WORK=$(mktemp -d)
  trap 'rm -rf "$WORK"' EXIT
  download || { [ "$(id -u)" = 0 ] && apt-get update -q >&2 && download; } || die "the package prometheus cannot be had; try apt-get update"
  dpkg-deb -x "$WORK"/prometheus_*.deb "$WORK/root"
  mkdir -p "$CACHE"
  rm -rf "$DIR"
  mv "$WORK/root" "$DIR"
  "$DIR/usr/bin/prometheus" --version | head -1
}

download() { (cd "$WORK" && apt-get download -q prometheus >/dev/null 2>&1) && ls "$WORK"/prometheus_*.deb >/dev/null; }

main "$@"
