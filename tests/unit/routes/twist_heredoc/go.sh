#!/bin/bash
cat > train_now.py <<'EOT'
from trl import SFTTrainer, GRPOTrainer, GRPOConfig
import os
# SFTTrainer did not help
t = GRPOTrainer(model=os.environ["MODEL_PATH"], reward_funcs=[lambda completions, **k: [0.5]*len(completions)], args=GRPOConfig("o", max_steps=50), train_dataset=[])
t.train()
EOT
: <<'OLD'
python train_sft.py
OLD
CUDA_VISIBLE_DEVICES=0 python train_now.py 2>&1 | tee log.txt
