import re
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import OnlineDPOConfig, OnlineDPOTrainer


def math_reward(completions, answer, **kw):
    return [1.0 if re.search(rf"\b{re.escape(a)}\b", c[-1]["content"]) else 0.0 for c, a in zip(completions, answer)]


def build():
    tok = AutoTokenizer.from_pretrained("models/base")
    ds = load_dataset("json", data_files="data/train.jsonl", split="train")
    cfg = OnlineDPOConfig(output_dir="output/odpo", learning_rate=5e-7, beta=0.1, max_new_tokens=256)
    return OnlineDPOTrainer(model="models/base", reward_funcs=math_reward, args=cfg, processing_class=tok, train_dataset=ds)


if __name__ == "__main__":
    t = build()
    t.train()
    t.save_model()
