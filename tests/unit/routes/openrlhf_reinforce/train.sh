#!/bin/bash
ray start --head --num-gpus 1
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \
   --pretrain models/base \
   --remote_rm_url reward_func.py \
   --advantage_estimator reinforce_baseline \
   --n_samples_per_prompt 8 \
   --actor_learning_rate 5e-7 \
   --init_kl_coef 1e-4 \
   --save_path output/rpp
