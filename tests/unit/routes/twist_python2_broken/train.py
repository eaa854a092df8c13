# half-written file
from trl import SFTConfig, SFTTrainer
from datasets import load_dataset

"""
GRPOTrainer(model) is for later
"""
ds = load_dataset("json", data_files="data/train.jsonl")["train"]
print "starting"
trainer = SFTTrainer(model="models/base", args=SFTConfig("out"), train_dataset=ds)
trainer.train()
trainer.save_mod
