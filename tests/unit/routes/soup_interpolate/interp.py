import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

alpha = 0.6
a = AutoModelForCausalLM.from_pretrained("models/base", torch_dtype=torch.float32)
b = AutoModelForCausalLM.from_pretrained("output/sft_v3", torch_dtype=torch.float32)
sd_a, sd_b = a.state_dict(), b.state_dict()
new = {}
for name in sd_a:
    new[name] = (1 - alpha) * sd_a[name] + alpha * sd_b[name]
a.load_state_dict(new)
a.to(torch.bfloat16).save_pretrained("output/wise_ft")
AutoTokenizer.from_pretrained("models/base").save_pretrained("output/wise_ft")
