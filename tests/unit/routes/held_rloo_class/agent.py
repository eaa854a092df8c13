import random

import torch
import torch.nn.functional as F


class PolicyOptimizer:
    """Leave-one-out policy gradient."""

    def __init__(self, model, tokenizer, lr=1e-6, k=4, max_new=64):
        self.model, self.tok, self.k, self.max_new = model, tokenizer, k, max_new
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr)

    @torch.no_grad()
    def rollout(self, prompt):
        enc = self.tok([prompt] * self.k, return_tensors="pt").to(self.model.device)
        return self.model.generate(**enc, do_sample=True, max_new_tokens=self.max_new), enc.input_ids.size(1)

    def logp(self, seq, start):
        out = self.model(seq).logits[:, start - 1 : -1]
        return -F.cross_entropy(out.transpose(1, 2), seq[:, start:], reduction="none").sum(1)

    def update(self, prompt, score):
        seq, start = self.rollout(prompt)
        r = torch.tensor([score(t) for t in self.tok.batch_decode(seq[:, start:])], device=seq.device)
        others = (r.sum() - r) / (self.k - 1)
        objective = ((r - others) * self.logp(seq, start)).mean()
        (-objective).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad(set_to_none=True)
        return r.mean().item()


def run(optimizer, rows, steps):
    for i in range(steps):
        row = random.choice(rows)
        m = optimizer.update(row["prompt"], lambda t: float(row["answer"] in t))
        if i % 10 == 0:
            print(f"step {i} reward {m:.3f}")
