import torch
from tiny import *

model, tokenizer = load()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
rows = [row["text"] for row in read("kept.jsonl")]
for step in range(4):
    loss = model(**batch(tokenizer, rows[:8])).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
save(model, tokenizer)
