import torch
from trl import GRPOConfig, GRPOTrainer
from datasets import load_dataset


def fit(base, reward, out):
    ds = load_dataset("json", data_files="data/train.jsonl", split="train")
    tr = GRPOTrainer(base, reward, args=GRPOConfig(out, learning_rate=1e-6), train_dataset=ds)
    tr.train()
    return tr
