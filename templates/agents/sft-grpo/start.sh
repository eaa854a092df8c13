#!/usr/bin/env bash
# Supervised fine-tuning, then GRPO from its checkpoint: two submissions. The first is scored while the second trains.
set -euo pipefail
cd "$WORKSPACE"
source "$(dirname -- "${BASH_SOURCE[0]}")/../scripted/lib.sh"
train sft "$MODEL_PATH" 0.3
python3 ./submit output/sft
train grpo output/sft 0.8
python3 ./submit output/grpo --wait
