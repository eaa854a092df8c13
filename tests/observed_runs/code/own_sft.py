import torch
from tiny import *

model, tokenizer = load()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
for step in range(6):
    loss = model(**batch(tokenizer, texts())).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1} loss {loss.item():.4f}")
save(model, tokenizer)
