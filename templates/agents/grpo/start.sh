#!/usr/bin/env bash
# GRPO straight from the base model: an early submission after a third of the time, and the best one at the end.
set -euo pipefail
cd "$WORKSPACE"
source "$(dirname -- "${BASH_SOURCE[0]}")/../scripted/lib.sh"
train_grpo "$MODEL_PATH" 0.9
submit_best output/grpo-early output/grpo
