import argparse, json
from vllm import LLM, SamplingParams

ap = argparse.ArgumentParser(); ap.add_argument("--model"); ap.add_argument("--out"); a = ap.parse_args()
rows = [json.loads(l) for l in open("data/train.jsonl")]
outs = LLM(a.model).generate([r["question"] for r in rows], SamplingParams(n=6, temperature=1.0, max_tokens=400))
with open(a.out, "w") as f:
    for r, o in zip(rows, outs):
        texts = sorted({c.text for c in o.outputs}, key=lambda t: r["answer"] in t)
        if len(texts) > 1 and r["answer"] in texts[-1] and r["answer"] not in texts[0]:
            f.write(json.dumps({"prompt": r["question"], "chosen": texts[-1], "rejected": texts[0]}) + "\n")
