import torch
from tiny import *

model, tokenizer = load()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
count = 4
for row in ROWS[:5]:
    ids, answers = sample(model, tokenizer, [row["prompt"]], count=count)
    rewards = torch.tensor([reward(a, row["completion"]) for a in answers])
    advantage = rewards - (rewards.sum() - rewards) / (count - 1)
    loss = -(advantage * logps(model, ids)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
save(model, tokenizer)
