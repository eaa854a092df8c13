#!/usr/bin/env bash
# For tasks that are played: an expert plays the training games, the model learns from what it won, then GRPO on whole episodes.
# Submissions: after the supervised part, early in RL, and the best one on own validation at the end.
set -euo pipefail
cd "$WORKSPACE"
source "$(dirname -- "${BASH_SOURCE[0]}")/../scripted/lib.sh"
played || { echo "this task is not played in episodes: use the agent sft-grpo" >&2; exit 1; }
finished traces || { python3 code/collect.py --model "$MODEL_PATH" --out output/traces --share 0.25 && touch output/traces.done; }
finished sft || launch "$MODEL_PATH" train_episodes.py --out output/sft --share 0.35 --traces output/traces
python3 ./submit output/sft --note "after SFT"
finished online || launch output/sft train_online.py --out output/online --share 0.95
submit_best output/sft output/online
