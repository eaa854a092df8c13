import glob
import sys

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

ckpts = sorted(glob.glob(sys.argv[1] + "/checkpoint-*"), key=lambda p: int(p.split("-")[-1]))[-3:]
total, n = None, 0
for c in ckpts:
    state = {}
    for shard in glob.glob(c + "/*.safetensors"):
        with safe_open(shard, framework="pt") as f:
            for key in f.keys():
                state[key] = f.get_tensor(key).to(torch.float32)
    if total is None:
        total = state
    else:
        for key, tensor in state.items():
            total[key].add_(tensor)
    n += 1
for key in total:
    total[key] /= n
model = AutoModelForCausalLM.from_pretrained(ckpts[-1], torch_dtype=torch.float32)
model.load_state_dict(total, strict=False)
model.bfloat16().save_pretrained(sys.argv[2])
