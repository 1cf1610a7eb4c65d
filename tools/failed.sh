#!/usr/bin/env bash
# Says at the very end of `make test` which parts and tests failed and with what words, so that whoever sees only the end of a long log
# knows. Usage: tools/failed.sh LOG [LINES]
set -euo pipefail
log=${1:?what stoker-suite and cargo wrote}
lines=${2:-6}
awk -v lines="$lines" '
  /^ *Running .*\(FAILED, / { sub(/^ *Running (unittests )?/, ""); print "failed: " $0 }
  /^---- .* stdout ----$/   { name = $2; left = 0 }
  left > 0                  { if ($0 == "" || /^note: run with|^stack backtrace:/) left = 0; else { print "    " $0; left-- } }
  /^thread .* panicked at / && name != "" { print "  " name ": " substr($0, index($0, "panicked at")); left = lines; name = "" }
  /^test .* - .* \.\.\. FAILED$/ { print "failed: " $0 }
' "$log"
