import argparse
import json
import os
import random

from vllm import LLM, SamplingParams

from utils import is_correct, make_prompt

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--n", type=int, default=8)
    ap.add_argument("--temperature", type=float, default=0.8)
    ap.add_argument("--out", default="work/kept.jsonl")
    args = ap.parse_args()
    os.makedirs("work", exist_ok=True)
    rows = [json.loads(l) for l in open("data/train.jsonl")]
    llm = LLM(model=os.environ["MODEL_PATH"])
    sp = SamplingParams(n=args.n, temperature=args.temperature, max_tokens=600)
    outputs = llm.generate([make_prompt(r) for r in rows], sp)
    kept = []
    for row, out in zip(rows, outputs):
        good = [c.text for c in out.outputs if is_correct(c.text, row["answer"])]
        if not good:
            continue
        for text in random.sample(good, min(2, len(good))):
            kept.append({"prompt": make_prompt(row), "completion": text})
    with open(args.out, "w") as f:
        for k in kept:
            f.write(json.dumps(k) + "\n")
    print(f"kept {len(kept)} samples")
