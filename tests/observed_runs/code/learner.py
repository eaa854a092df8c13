import sys
import torch
from tiny import *

model, tok = load(sys.argv[1])
opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
rows = read(sys.argv[2])
for at in range(0, len(rows), 8):
    part = rows[at : at + 8]
    ids = tok([r["text"] for r in part], return_tensors="pt", padding=True).input_ids
    advantage = torch.tensor([r["advantage"] for r in part])
    loss = -(advantage * logps(model, ids)).mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
save(model, tok, sys.argv[3])
