from trl import GRPOConfig, GRPOTrainer
from datasets import load_dataset

ds = load_dataset("json", data_files="data/train.jsonl", split="train")
trainer = GRPOTrainer(model="models/base", reward_funcs=[lambda completions, **k: [1.0] * len(completions)], args=GRPOConfig("out"), train_dataset=ds)
# trainer.train()
print("trainer ready")
