from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

USE_RL = False
DEBUG = 0


def reward(completions, **kw):
    return [len(c) / 100 for c in completions]


ds = load_dataset("json", data_files="data/train.jsonl", split="train")
if USE_RL:
    t = GRPOTrainer(model="models/base", reward_funcs=reward, args=GRPOConfig("out"), train_dataset=ds)
    t.train()
if False:
    GRPOTrainer(model="models/base", reward_funcs=reward, train_dataset=ds).train()
while DEBUG:
    GRPOTrainer(model="models/base", reward_funcs=reward, train_dataset=ds).train()
t = SFTTrainer(model="models/base", args=SFTConfig("out", max_steps=100), train_dataset=ds)
t.train()
