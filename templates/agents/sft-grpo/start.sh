#!/usr/bin/env bash
# Supervised fine-tuning, then GRPO from its checkpoint. The first is submitted while the second trains; the best one is final.
set -euo pipefail
cd "$WORKSPACE"
source "$(dirname -- "${BASH_SOURCE[0]}")/../scripted/lib.sh"
train_sft "$MODEL_PATH" 0.3
python3 ./submit output/sft --note "after SFT"
train_grpo output/sft 0.9
submit_best output/sft output/grpo-early output/grpo
