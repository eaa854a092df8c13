import torch
from tiny import *

model, tokenizer = load()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
baseline = 0.0
for step in range(5):
    rows = ROWS[step : step + 4]
    ids, answers = sample(model, tokenizer, [row["prompt"] for row in rows])
    rewards = torch.tensor([reward(a, row["completion"]) for a, row in zip(answers, rows)])
    loss = -((rewards - baseline) * logps(model, ids)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    baseline = 0.9 * baseline + 0.1 * rewards.mean()
    print(f"step {step} reward {rewards.mean():.3f} loss {loss.item():.4f}")
save(model, tokenizer)
