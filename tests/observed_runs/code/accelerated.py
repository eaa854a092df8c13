import torch
from accelerate import Accelerator
from tiny import *

accelerator = Accelerator(cpu=True)
model, tokenizer = load()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-4))
for step in range(4):
    loss = model(**batch(tokenizer, texts())).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
if accelerator.is_main_process:
    save(accelerator.unwrap_model(model), tokenizer)
