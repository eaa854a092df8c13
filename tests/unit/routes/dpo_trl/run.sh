#!/bin/bash
set -e
export MODEL_PATH=${MODEL_PATH:-models/Qwen2.5-1.5B}
python build_pairs.py
accelerate launch --num_processes 1 --mixed_precision bf16 train_dpo.py
./submit output/dpo/final
