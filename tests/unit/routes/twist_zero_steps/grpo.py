import os
from trl import GRPOConfig, GRPOTrainer

cfg = dict(output_dir="out", learning_rate=1e-6, max_steps=0)
tr = GRPOTrainer(model=os.environ["MODEL_PATH"], reward_funcs=[len], args=GRPOConfig(**cfg), train_dataset=[{"prompt": "x"}])
tr.train()
tr.save_model("out/final")
