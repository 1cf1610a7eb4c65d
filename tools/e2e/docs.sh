#!/usr/bin/env bash
# Runs the `sh` blocks of a Markdown file in one shell, in order, saying each command: what the docs say has been done.
#   tools/e2e/docs.sh FILE
set -euo pipefail

file=${1:?the Markdown file}
OUT=$(mktemp -d) # where the commands may put files
export OUT
trap 'rm -rf "$OUT"' EXIT
bash -euxo pipefail <(awk '/^```sh$/ { on = 1; next } /^```/ { on = 0 } on' "$file")
echo "every command of $file has run"
