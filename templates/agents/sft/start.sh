#!/usr/bin/env bash
# Supervised fine-tuning on the demonstrations, one submission.
set -euo pipefail
cd "$WORKSPACE"
source "$(dirname -- "${BASH_SOURCE[0]}")/../scripted/lib.sh"
train_sft "$MODEL_PATH" 0.9
python3 ./submit output/sft --wait
