import torch
from tiny import *

model, tokenizer = load()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for round in range(3):
    _, answers = sample(model, tokenizer, [row["prompt"] for row in ROWS for _ in range(2)])
    pairs = [(row, a) for row, a in zip([r for r in ROWS for _ in range(2)], answers)]
    correct = [row["prompt"] + a for row, a in pairs if reward(a, row["completion"]) > 0.1]
    for step in range(3):
        loss = model(**batch(tokenizer, correct[:8] or texts())).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
save(model, tokenizer)
