#!/bin/bash
set -e
ROOT=$(dirname "$0")
MODEL=${MODEL_PATH}
# ---------- SFT
torchrun --standalone --nnodes=1 --nproc_per_node=1 -m verl.trainer.fsdp_sft_trainer \
  data.train_files=data/sft.parquet data.prompt_key=question data.response_key=answer \
  optim.lr=1e-5 model.partial_pretrain=$MODEL trainer.default_local_dir=ckpt/sft trainer.total_epochs=1
# ---------- RL
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \
  algorithm.adv_estimator=rloo actor_rollout_ref.model.path=ckpt/sft/global_step_100 \
  data.train_files=data/rl.parquet trainer.total_training_steps=100
