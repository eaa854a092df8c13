
import torch, copy
from transformers import AutoModelForCausalLM
m=AutoModelForCausalLM.from_pretrained("models/base"); ema=copy.deepcopy(m)
opt=torch.optim.AdamW(m.parameters(),1e-5)
from data import batches
for b in batches():
    loss=m(**b).loss; loss.backward(); opt.step(); opt.zero_grad()
    with torch.no_grad():
        for p,q in zip(ema.parameters(),m.parameters()): p.mul_(.999).add_(q,alpha=.001)
ema.save_pretrained("output/v1")
