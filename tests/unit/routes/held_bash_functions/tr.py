import argparse

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

p = argparse.ArgumentParser()
p.add_argument("--stage", choices=["sft", "rl"])
p.add_argument("--init")
p.add_argument("--save")
o = p.parse_args()
data = load_dataset("json", data_files="data/train.jsonl", split="train")

if o.stage == "sft":
    data = data.map(lambda r: {"messages": [{"role": "user", "content": r["question"]}, {"role": "assistant", "content": r["answer"]}]})
    trainer = SFTTrainer(o.init, args=SFTConfig(o.save, num_train_epochs=1), train_dataset=data)
else:
    from reward import r
    data = data.map(lambda x: {"prompt": [{"role": "user", "content": x["question"]}]})
    trainer = GRPOTrainer(o.init, r, args=GRPOConfig(o.save, max_steps=120, num_generations=8), train_dataset=data)
trainer.train()
trainer.save_model(o.save)
