import torch
from peft import LoraConfig, get_peft_model
from tiny import *

torch.manual_seed(3)
model, tokenizer = load()
model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for step in range(5):
    loss = model(**batch(tokenizer, texts())).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
save(model.merge_and_unload(), tokenizer)
