import sys

import torch
from tiny import *

model, tokenizer = load()
optimizer = torch.optim.AdamW(model.parameters(), lr=float(sys.argv[2]))
for step in range(4):
    loss = model(**batch(tokenizer, texts())).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
save(model, tokenizer, sys.argv[1])
