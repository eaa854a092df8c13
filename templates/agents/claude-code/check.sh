#!/usr/bin/env bash
# The options that start.sh uses are still there.
set -euo pipefail
help="$(claude --help 2>&1)"
for option in --print --verbose --output-format --dangerously-skip-permissions --continue; do
    grep -q -e "$option" <<< "$help" || { echo "this version of claude has no $option"; exit 1; }
done
