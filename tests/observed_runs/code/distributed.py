import torch
from tiny import *

torch.distributed.init_process_group("gloo")
model, tokenizer = load()
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=2e-4)
for step in range(4):
    loss = wrapped(**batch(tokenizer, texts())).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if torch.distributed.get_rank() == 0:
    save(model, tokenizer)
torch.distributed.destroy_process_group()
