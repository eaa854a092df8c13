#!/bin/bash
#SBATCH --gres=gpu:1
source ~/.bashrc
torchrun --nproc_per_node=2 finetune.py \
  --output_dir output/lora64 --learning_rate 2e-4 --num_train_epochs 2 \
  --per_device_train_batch_size 8 --bf16 True --logging_steps 10
