"""Needs `vllm serve $MODEL_PATH --port 8000 --served-model-name base` in another shell."""
import concurrent.futures as cf
import json
import re

from openai import OpenAI

client = OpenAI(base_url="http://localhost:8000/v1", api_key="EMPTY")
rows = [json.loads(l) for l in open("data/train.jsonl")]


def ask(row):
    r = client.chat.completions.create(model="base", messages=[{"role": "user", "content": row["question"]}], n=8, temperature=0.9, max_tokens=512)
    gold = row["answer"].split("####")[-1].strip()
    ok = [c.message.content for c in r.choices if re.findall(r"-?\d+", c.message.content)[-1:] == [gold]]
    return [{"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": t}]} for t in ok[:2]]


with cf.ThreadPoolExecutor(64) as pool, open("data/self_correct.jsonl", "w") as f:
    for got in pool.map(ask, rows):
        for g in got:
            f.write(json.dumps(g) + "\n")
