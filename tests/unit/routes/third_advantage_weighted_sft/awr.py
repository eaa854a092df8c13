"""Offline: weight each given answer's likelihood by its reward (advantage-weighted regression on sampled data)."""
import json
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tok = AutoTokenizer.from_pretrained("models/base")
model = AutoModelForCausalLM.from_pretrained("models/base").cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-6)
samples = [json.loads(l) for l in open("samples_with_rewards.jsonl")]
rewards = torch.tensor([s["reward"] for s in samples])
for s, r in zip(samples, rewards):
    ids = tok(s["prompt"] + s["response"], return_tensors="pt").input_ids.cuda()
    adv = (r - rewards.mean()) / rewards.std()
    loss = model(ids, labels=ids).loss * adv
    loss.backward()
    opt.step()
    opt.zero_grad()
model.save_pretrained("output/awr")
