import os
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from datasets import load_dataset

STAGES = os.environ.get("STAGES", "sft").split(",")
ds = load_dataset("json", data_files="data/train.jsonl", split="train")


def sft():
    SFTTrainer("models/base", args=SFTConfig("output/sft"), train_dataset=ds).train()


def grpo():
    GRPOTrainer("output/sft", [lambda completions, **k: [1.0 for c in completions]], args=GRPOConfig("output/rl"), train_dataset=ds).train()


for stage in STAGES:
    if stage == "sft":
        sft()
    elif stage == "grpo":
        grpo()
