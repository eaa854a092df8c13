#!/usr/bin/env bash
# Rejection sampling in two rounds: answers (or episodes) are sampled, the right ones are kept, and the model is trained on
# them. A model that gets nothing right has nothing to learn from, and ends. A submission after each round; the best one is final.
set -euo pipefail
cd "$WORKSPACE"
source "$(dirname -- "${BASH_SOURCE[0]}")/../scripted/lib.sh"
from="$MODEL_PATH"
for round in 1 2; do
  finished "kept-$round" || python3 code/sample_right.py --model "$from" --out "output/kept-$round" --round "$round" --share 0.25 || break
  if ! finished "round-$round"; then
    if played; then rows=(--traces "output/kept-$round"); else rows=(--rows "output/kept-$round/rows.jsonl"); fi
    launch "$from" train_sft.py --out "output/round-$round" --share 0.5 "${rows[@]}"
  fi
  python3 ./submit "output/round-$round"
  from="output/round-$round"
done
submit_best output/round-1 output/round-2
