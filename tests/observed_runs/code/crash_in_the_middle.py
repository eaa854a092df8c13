import torch
from tiny import *

model, tokenizer = load()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(9):
    loss = model(**batch(tokenizer, texts()[step * 2 : step * 2 + 2])).loss  # no row is left at step 8
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
save(model, tokenizer)
