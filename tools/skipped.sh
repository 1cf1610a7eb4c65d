#!/usr/bin/env bash
# Says at the end of `make test` which tests could not run here and why. Usage: tools/skipped.sh LOG
set -euo pipefail
log=${1:?the file tests append "skipped: NAME: REASON" lines to}
[ -s "$log" ] || { echo "skipped: 0 tests"; exit 0; }
sort -u "$log"
echo "skipped: $(sort -u "$log" | wc -l) tests"
