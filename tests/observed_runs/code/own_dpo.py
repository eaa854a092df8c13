import torch
from tiny import *
from torch.nn import functional

policy, tokenizer = load()
reference, _ = load()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
for step in range(4):
    chosen, rejected = (batch(tokenizer, [r["prompt"] + a for r in ROWS[:8]])["input_ids"] for a in (" #### 7", " no"))
    with torch.no_grad():
        ref_chosen, ref_rejected = logps(reference, chosen), logps(reference, rejected)
    margin = logps(policy, chosen) - logps(policy, rejected) - (ref_chosen - ref_rejected)
    loss = -functional.logsigmoid(0.1 * margin).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
save(policy, tokenizer)
