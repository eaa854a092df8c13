#!/usr/bin/env bash
# For tasks that are played: an expert plays the training games, the model learns from what it won, and from what the expert says
# about the model's own play; then GRPO on whole episodes.
# Submissions: after each supervised part, early in RL, and the best one on own validation at the end.
set -euo pipefail
cd "$WORKSPACE"
source "$(dirname -- "${BASH_SOURCE[0]}")/../scripted/lib.sh"
played || { echo "this task is not played in episodes: use the agent sft-grpo" >&2; exit 1; }
finished traces || { python3 code/collect.py --model "$MODEL_PATH" --out output/traces --share 0.25 && touch output/traces.done; }
finished sft || launch "$MODEL_PATH" train_episodes.py --out output/sft --share 0.3 --traces output/traces
python3 ./submit output/sft --note "after SFT"
# The expert's word where the model went astray, if the task has an expert that can give it; then RL goes on from there.
from=output/sft
if finished corrected || launch output/sft train_corrected.py --out output/corrected --share 0.3 --traces output/traces; then
  from=output/corrected
  python3 ./submit output/corrected --note "after SFT on corrections"
fi
train_online "$from"
submit_best "$from" output/online
