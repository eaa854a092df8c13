#!/bin/bash
set -euxo pipefail
export MODEL=models/Qwen2.5-0.5B
STAGE=sft OUT=output/sft python -u stage.py 2>&1 | tee logs/sft.log
STAGE=rl MODEL=output/sft OUT=output/rl accelerate launch --num_processes 2 stage.py |& tee logs/rl.log
