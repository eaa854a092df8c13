"""Minimal GRPO without trl: sample groups, normalise rewards per group, clipped objective."""
import copy
import json
import random
import re

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

G, LR, CLIP, BETA, STEPS, BS = 8, 1e-6, 0.2, 0.02, 300, 4
tok = AutoTokenizer.from_pretrained("models/base", padding_side="left")
policy = AutoModelForCausalLM.from_pretrained("models/base", torch_dtype=torch.bfloat16).cuda()
ref = copy.deepcopy(policy).eval().requires_grad_(False)
opt = torch.optim.AdamW(policy.parameters(), lr=LR)
rows = [json.loads(l) for l in open("data/train.jsonl")]


def reward_fn(text, gold):
    nums = re.findall(r"-?\d+", text)
    return 1.0 if nums and nums[-1] == gold else 0.0


def token_logps(model, seqs, n_prompt):
    logits = model(seqs).logits[:, :-1]
    lp = F.log_softmax(logits.float(), -1).gather(-1, seqs[:, 1:, None]).squeeze(-1)
    return lp[:, n_prompt - 1 :]


for step in range(STEPS):
    batch = random.sample(rows, BS)
    for row in batch:
        enc = tok([row["question"]] * G, return_tensors="pt").to("cuda")
        n = enc.input_ids.shape[1]
        with torch.no_grad():
            seqs = policy.generate(**enc, do_sample=True, temperature=1.0, max_new_tokens=200)
            old = token_logps(policy, seqs, n)
            ref_lp = token_logps(ref, seqs, n)
        texts = tok.batch_decode(seqs[:, n:], skip_special_tokens=True)
        r = torch.tensor([reward_fn(t, row["gold"]) for t in texts], device="cuda")
        adv = (r - r.mean()) / (r.std() + 1e-4)
        new = token_logps(policy, seqs, n)
        ratio = torch.exp(new - old)
        unclipped = ratio * adv[:, None]
        clipped = torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * adv[:, None]
        kl = torch.exp(ref_lp - new) - (ref_lp - new) - 1
        loss = -(torch.min(unclipped, clipped) - BETA * kl).mean()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    opt.step()
    opt.zero_grad()
    if step % 50 == 0:
        print({"step": step, "reward": r.mean().item()})
policy.save_pretrained("output/grpo_min")
