from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

LR = 0.0
ds = load_dataset("json", data_files="data/train.jsonl", split="train")
trainer = GRPOTrainer(
    model="models/base",
    reward_funcs=[lambda completions, **k: [0.0 for _ in completions]],
    args=GRPOConfig(output_dir="out", learning_rate=LR, max_steps=5),
    train_dataset=ds,
)
trainer.train()
trainer.save_model("out")
