from datasets import load_dataset
from trl import RLOOConfig, RLOOTrainer


def reward(completions, answer, **kw):
    return [float(str(a) in c) for c, a in zip(completions, answer)]


ds = load_dataset("json", data_files="data/train.jsonl", split="train").rename_column("question", "prompt")
t = RLOOTrainer(model="ckpt/sft_warm", reward_funcs=reward, args=RLOOConfig(output_dir="ckpt/rloo", learning_rate=2e-6, num_generations=4), train_dataset=ds)
t.train()
t.save_model("ckpt/rloo")
