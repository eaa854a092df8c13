#!/usr/bin/env bash
# As sft-grpo-online, to show what RL gives: SFT is stopped early on purpose (EXPERT_WEAK_STEPS of 32 of the EXPERT_WEAK_GAMES games'
# episodes), there are no corrections, and RL has the rest of the time.
set -euo pipefail
cd "$WORKSPACE"
source "$(dirname -- "${BASH_SOURCE[0]}")/../scripted/lib.sh"
played || { echo "this task is not played in episodes: use the agent sft-grpo" >&2; exit 1; }
finished traces || { python3 code/collect.py --model "$MODEL_PATH" --out output/traces --goals "${EXPERT_WEAK_GAMES:-480}" --share 0.25 && touch output/traces.done; }
finished sft || launch "$MODEL_PATH" train_episodes.py --out output/sft --share 0.3 --traces output/traces --steps "${EXPERT_WEAK_STEPS:-24}"
python3 ./submit output/sft --note "after a weak SFT"
train_online output/sft
submit_best output/sft output/online
