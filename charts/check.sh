#!/usr/bin/env bash
# The chart lints, renders in every shape, and a real API server accepts what it renders (tests/tests/chart.rs).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

"$(tools/kube/build.sh --where helm)" lint --strict charts/stoker \
  --set image.repository=registry.example/stoker-operator,agent.image.repository=registry.example/stoker-agent
cargo test -q --test system chart::
