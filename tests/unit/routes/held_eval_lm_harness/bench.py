import argparse
import json
import subprocess

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def reward(text, gold):
    return float(gold in text)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("ckpt")
    ap.add_argument("--n", type=int, default=200)
    a = ap.parse_args()
    subprocess.run(["lm_eval", "--model", "hf", "--model_args", f"pretrained={a.ckpt}", "--tasks", "gsm8k", "--limit", str(a.n)])
    tok = AutoTokenizer.from_pretrained(a.ckpt)
    model = AutoModelForCausalLM.from_pretrained(a.ckpt).eval()
    rows = [json.loads(x) for x in open("data/dev.jsonl")][: a.n]
    rewards, losses = [], []
    with torch.inference_mode():
        for r in rows:
            ids = tok(r["question"], return_tensors="pt")
            losses.append(model(**ids, labels=ids["input_ids"]).loss.item())
            rewards.append(reward(tok.decode(model.generate(**ids, max_new_tokens=128)[0]), r["answer"]))
    mean = sum(rewards) / len(rewards)
    print(json.dumps({"reward": mean, "nll": sum(losses) / len(losses)}))


if __name__ == "__main__":
    main()
