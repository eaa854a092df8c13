#!/usr/bin/env bash
# GRPO straight from the base model, one submission.
set -euo pipefail
cd "$WORKSPACE"
source "$(dirname -- "${BASH_SOURCE[0]}")/../scripted/lib.sh"
train grpo "$MODEL_PATH" 0.8
python3 ./submit output/grpo --wait
