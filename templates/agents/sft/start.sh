#!/usr/bin/env bash
# Supervised fine-tuning on the demonstrations, one submission.
set -euo pipefail
cd "$WORKSPACE"
source "$(dirname -- "${BASH_SOURCE[0]}")/../scripted/lib.sh"
train sft "$MODEL_PATH" 0.8
python3 ./submit output/sft --wait
