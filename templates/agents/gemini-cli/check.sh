#!/usr/bin/env bash
# The options that start.sh uses are still there.
set -euo pipefail
help="$(gemini --help 2>&1)"
for option in --model --yolo --output-format --resume stream-json; do
    grep -q -e "$option" <<< "$help" || { echo "this version of gemini has no $option"; exit 1; }
done
