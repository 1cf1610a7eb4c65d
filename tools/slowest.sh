#!/usr/bin/env bash
# Says at the end of `make test` which tests took longest, and marks what took longer than it should on two cores that are free.
# A busy machine is no reason to fail. Usage: tools/slowest.sh LOG [SECONDS]
set -euo pipefail
log=${1:?what stoker-suite wrote}
aim=${2:-90}
awk -v aim="$aim" '
  /^ *Running / || /^ *Doc-tests / { sub(/^ *Running (unittests )?/, ""); sub(/^ *Doc-tests /, "documentation of "); sub(/ \(.*/, ""); name = $0 }
  /^test result: / && match($0, /finished in [0-9.]+s/) { print substr($0, RSTART + 12, RLENGTH - 13), name; n++ }
  END { if (n == 0) exit 1 }
' "$log" | sort -rn | awk -v aim="$aim" '
  NR <= 5 { seconds = $1; sub(/^[^ ]+ /, ""); printf "%7.1f s  %s%s\n", seconds, $0, (seconds > aim) ? "  (aim: " aim " s)" : "" }
  END { if (NR == 0) { print "no test ran"; exit 1 } }
'
