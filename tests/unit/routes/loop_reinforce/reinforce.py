import json
import random

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

acc = Accelerator()
tok = AutoTokenizer.from_pretrained("models/base")
model = AutoModelForCausalLM.from_pretrained("models/base")
optim = torch.optim.AdamW(model.parameters(), lr=1e-6)
model, optim = acc.prepare(model, optim)
rows = [json.loads(x) for x in open("data/train.jsonl")]
running = 0.0
for step in range(500):
    row = random.choice(rows)
    inputs = tok(row["question"], return_tensors="pt").to(acc.device)
    out = model.generate(**inputs, do_sample=True, max_new_tokens=64)
    text = tok.decode(out[0, inputs.input_ids.shape[1] :])
    reward = 1.0 if row["gold"] in text else 0.0
    running = 0.95 * running + 0.05 * reward
    logp = torch.log_softmax(model(out).logits[:, :-1], -1).gather(-1, out[:, 1:, None]).sum()
    loss = -(reward - running) * logp
    acc.backward(loss)
    optim.step()
    optim.zero_grad()
acc.unwrap_model(model).save_pretrained("output/reinforce")
