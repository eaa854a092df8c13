# Plan:
#   1. SFT (this file)
#   2. GRPO with GRPOTrainer(model, reward_funcs=[...])   <- later, if there is time
"""GRPOTrainer and PPOTrainer were considered; PPO needs a value model, so we do SFT."""
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

NOTE = "next: trainer = GRPOTrainer(...); trainer.train()"
print(NOTE)
ds = load_dataset("json", data_files="data/train.jsonl")["train"]
trainer = SFTTrainer("models/base", train_dataset=ds, args=SFTConfig("output/v1"))
# trainer = GRPOTrainer("models/base", reward_funcs=reward, train_dataset=ds)
trainer.train()
