#!/usr/bin/env bash
# Its loop for RL post-training is there, and whole with what loop.py completes.
set -euo pipefail
first="$(head -n 1 "$(command -v rdagent)")"
read -r -a python <<< "${first#\#!}"
"${python[@]}" "$(dirname "$0")/loop.py" --help > /dev/null 2>&1 || { echo "this rdagent's loop for RL post-training is not there, or incomplete"; exit 1; }
