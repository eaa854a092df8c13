import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, PPOTrainer, SFTConfig, SFTTrainer  # noqa

config = GRPOConfig(output_dir="output/x", learning_rate=1e-6)  # kept for the second stage
ds = load_dataset("json", data_files="data/train.jsonl", split="train")
sft = SFTTrainer(model="models/base", args=SFTConfig(output_dir="output/x", learning_rate=1e-5), train_dataset=ds)
sft.train()
sft.save_model()
