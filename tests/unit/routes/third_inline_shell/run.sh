#!/bin/bash
MODE="${MODE:-kto}"
python - "$MODE" <<'PY'
import sys
import trl
kind = sys.argv[1].upper()
T, C = getattr(trl, kind + "Trainer"), getattr(trl, kind + "Config")
T(model="models/base", args=C("output/x"), train_dataset=[]).train()
PY
