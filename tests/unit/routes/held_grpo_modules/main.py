import json, random, re
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM
from src.rollout import Sampler
from src.learner import Learner

MODEL = "models/base"
tok = AutoTokenizer.from_pretrained(MODEL)
learner = Learner(AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.bfloat16).cuda(), 1e-6)
sampler = Sampler(LLM(MODEL, gpu_memory_utilization=0.3, enable_sleep_mode=True), tok, 8)
rows = [json.loads(l) for l in open("data/train.jsonl")]


def grade(t, gold):
    m = re.search(r"answer is\D*(-?[\d,]+)", t)
    return float(m is not None and m.group(1).replace(",", "") == gold)


def collate(groups, prompts):
    seqs = [tok(p).input_ids + list(ids) for p, g in zip(prompts, groups) for ids, _ in g]
    starts = [len(tok(p).input_ids) for p, g in zip(prompts, groups) for _ in g]
    n = max(map(len, seqs))
    ids = torch.tensor([s + [0] * (n - len(s)) for s in seqs]).cuda()
    mask = torch.tensor([[0.0] * b + [1.0] * (len(s) - b) + [0.0] * (n - len(s)) for s, b in zip(seqs, starts)]).cuda()
    return ids, mask


for it in range(100):
    rs = random.sample(rows, 16)
    prompts = [r["question"] + "\n" for r in rs]
    groups = sampler(prompts)
    scores = torch.tensor([[grade(t, r["gold"]) for _, t in g] for r, g in zip(rs, groups)]).cuda()
    ids, mask = collate(groups, prompts)
    with torch.no_grad():
        old = learner.lp(ids, mask)
    for _ in range(2):
        loss = learner.step(ids, mask, old, scores)
    print({"iter": it, "loss": loss.item(), "reward": scores.mean().item()})
learner.model.save_pretrained("output/grpo")
