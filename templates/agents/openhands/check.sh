#!/usr/bin/env bash
# The options that start.sh uses are still there.
set -euo pipefail
help="$(openhands --help 2>&1)"
for option in --headless --json --always-approve --override-with-envs --file --resume --last; do
    grep -q -e "$option" <<< "$help" || { echo "this version of openhands has no $option"; exit 1; }
done
