import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.manual_seed(0)
m = AutoModelForCausalLM.from_pretrained("models/base")
with torch.no_grad():
    for p in m.parameters():
        p.add_(torch.randn_like(p) * 1e-4)
m.save_pretrained("output/noisy")
AutoTokenizer.from_pretrained("models/base").save_pretrained("output/noisy")
