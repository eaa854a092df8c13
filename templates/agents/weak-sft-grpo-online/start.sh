#!/usr/bin/env bash
# As sft-grpo-online, to show what RL gives: SFT on 480 games is stopped on purpose as soon as it wins a quarter of 96 validation games, there are
# no corrections, and RL has the rest of the time, with larger steps and shorter episodes than from a good start.
set -euo pipefail
cd "$WORKSPACE"
source "$(dirname -- "${BASH_SOURCE[0]}")/../scripted/lib.sh"
played || { echo "this task is not played in episodes: use the agent sft-grpo" >&2; exit 1; }
finished traces || { python3 code/collect.py --model "$MODEL_PATH" --out output/traces --goals 480 --share 0.25 && touch output/traces.done; }
finished sft || launch "$MODEL_PATH" train_episodes.py --out output/sft --share 0.3 --traces output/traces --steps 30 --until 0.25
python3 ./submit output/sft --note "after a weak SFT"
train_online output/sft --games 48 --steps 20 --rate 1e-4
submit_best output/sft output/online
