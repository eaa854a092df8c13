import json
import math

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

device = "cuda" if torch.cuda.is_available() else "cpu"
name = "models/base"
tok = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name).to(device)
examples = [json.loads(l) for l in open("data/train.jsonl")]


def encode(ex):
    p = tok(ex["question"] + "\n").input_ids
    a = tok(ex["answer"]).input_ids + [tok.eos_token_id]
    return p + a, [-100] * len(p) + a


def pad(batch):
    n = max(len(i) for i, _ in batch)
    ids = torch.tensor([i + [0] * (n - len(i)) for i, _ in batch])
    labels = torch.tensor([l + [-100] * (n - len(l)) for _, l in batch])
    return ids, labels


loader = DataLoader([encode(e) for e in examples], batch_size=16, shuffle=True, collate_fn=pad)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, betas=(0.9, 0.95))
criterion = torch.nn.CrossEntropyLoss(ignore_index=-100)
EPOCHS = 2
total = EPOCHS * len(loader)
step = 0
model.train()
for epoch in range(EPOCHS):
    for ids, labels in loader:
        ids, labels = ids.to(device), labels.to(device)
        for g in optimizer.param_groups:
            g["lr"] = 2e-5 * 0.5 * (1 + math.cos(math.pi * step / total))
        logits = model(ids).logits
        loss = criterion(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
model.save_pretrained("output/own_sft")
