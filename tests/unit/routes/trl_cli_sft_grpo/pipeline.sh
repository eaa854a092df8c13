#!/usr/bin/env bash
set -euo pipefail
BASE=${MODEL_PATH:?set MODEL_PATH}
trl sft --model_name_or_path "$BASE" --dataset_name data/sft --output_dir output/stage1 --learning_rate 1e-5 --num_train_epochs 1
trl grpo --model_name_or_path output/stage1 --dataset_name data/prompts --reward_funcs accuracy_reward --output_dir output/stage2 --learning_rate 1e-6 --num_generations 8
./submit output/stage2
