"""Sample answers from the base model and make chosen/rejected pairs."""
import json
import os

from vllm import LLM, SamplingParams

llm = LLM(model=os.environ["MODEL_PATH"], gpu_memory_utilization=0.8)
params = SamplingParams(n=8, temperature=0.9, max_tokens=512)
rows = [json.loads(line) for line in open("data/train.jsonl")]
outs = llm.chat([[{"role": "user", "content": r["question"]}] for r in rows], params)

with open("pairs.jsonl", "w") as f:
    for row, out in zip(rows, outs):
        gold = row["answer"].split("####")[-1].strip()
        good = [o.text for o in out.outputs if gold in o.text.split("\n")[-1]]
        bad = [o.text for o in out.outputs if gold not in o.text]
        if good and bad:
            f.write(json.dumps({"prompt": row["question"], "chosen": good[0], "rejected": bad[0]}) + "\n")
