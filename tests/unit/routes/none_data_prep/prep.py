"""Prepare prompts for GRPO training (no training here)."""
import json
import random

random.seed(0)


def grpo_prompt(q):
    return {"prompt": [{"role": "user", "content": q}]}


rows = [json.loads(l) for l in open("data/train.jsonl")]
random.shuffle(rows)
with open("data/grpo_prompts.jsonl", "w") as f:
    for r in rows[:2000]:
        if len(r["question"]) < 800:
            f.write(json.dumps({**grpo_prompt(r["question"]), "answer": r["answer"].split("####")[-1].strip()}) + "\n")
print("wrote prompts")
