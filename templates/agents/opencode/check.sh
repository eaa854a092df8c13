#!/usr/bin/env bash
# The options that start.sh uses are still there.
set -euo pipefail
help="$(opencode run --help 2>&1)"
for option in --format --continue; do
    grep -q -e "$option" <<< "$help" || { echo "this version of opencode has no \`run $option\`"; exit 1; }
done
