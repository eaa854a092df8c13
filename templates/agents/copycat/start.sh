#!/usr/bin/env bash
# Submits the base model as it came: a score that no training earned, which the report must flag as an untrained copy.
set -euo pipefail
cd "$WORKSPACE"
mkdir -p output/copy
find "$MODEL_PATH/" -maxdepth 1 -type f ! -name '*.py' -exec cp -f {} output/copy/ \;
chmod u+w output/copy/*
python3 ./submit output/copy --wait
