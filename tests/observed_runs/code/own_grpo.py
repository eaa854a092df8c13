import torch
from tiny import *

model, tokenizer = load()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for step in range(4):
    row = ROWS[step]
    ids, answers = sample(model, tokenizer, [row["prompt"]], count=8)
    rewards = torch.tensor([reward(a, row["completion"]) for a in answers])
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    old = logps(model, ids).detach()
    for _ in range(2):
        ratio = torch.exp(logps(model, ids) - old)
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print({"step": step, "reward": float(rewards.mean()), "loss": loss.item()})
save(model, tokenizer)
