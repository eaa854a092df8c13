import json
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tok = AutoTokenizer.from_pretrained("models/base", padding_side="left")
model = AutoModelForCausalLM.from_pretrained("models/base").cuda()
opt = torch.optim.AdamW(model.parameters(), lr=1e-5)
rows = [json.loads(l) for l in open("data/train.jsonl")]


def solved(text, row):
    return row["gold"] in text.split("\n")[-1]


for it in range(10):
    buffer = []
    for row in random.sample(rows, 64):
        enc = tok([row["question"]] * 4, return_tensors="pt").to("cuda")
        with torch.no_grad():
            seqs = model.generate(**enc, do_sample=True, max_new_tokens=128)
        for seq, text in zip(seqs, tok.batch_decode(seqs)):
            if solved(text, row):
                buffer.append(seq)
    for seq in buffer:
        out = model(seq[None], labels=seq[None])
        out.loss.backward()
        opt.step()
        opt.zero_grad()
model.save_pretrained("output/ei")
