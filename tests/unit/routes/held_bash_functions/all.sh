#!/usr/bin/env bash
set -euo pipefail
METHOD=${1:-both}
BASE=${MODEL_PATH:-models/base}
log() { echo "[$(date +%T)] $*"; }

warmup() {
    log "sft"
    python -u tr.py --stage sft --init "$BASE" --save runs/sft 2>&1 | tee sft.log
}

improve() {
    log "rl from $1"
    python -u tr.py --stage rl --init "$1" --save runs/rl 2>&1 | tee rl.log
}

if [[ "$METHOD" == "both" ]]; then
    warmup
    improve runs/sft
else
    improve "$BASE"
fi
./submit runs/rl
