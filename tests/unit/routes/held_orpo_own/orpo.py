import json
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

lam = 0.1
tok = AutoTokenizer.from_pretrained("models/base")
m = AutoModelForCausalLM.from_pretrained("models/base").cuda()
o = torch.optim.AdamW(m.parameters(), 8e-6)


def avg_logp(text):
    ids = tok(text, return_tensors="pt").input_ids.cuda()
    lg = m(ids).logits[0, :-1]
    return lg.log_softmax(-1)[torch.arange(lg.size(0)), ids[0, 1:]].mean()


for line in open("data/pairs.jsonl"):
    ex = json.loads(line)
    good, bad = avg_logp(ex["prompt"] + ex["chosen"]), avg_logp(ex["prompt"] + ex["rejected"])
    log_odds = (good - bad) - (torch.log1p(-good.exp()) - torch.log1p(-bad.exp()))
    loss = -good - lam * F.logsigmoid(log_odds)
    loss.backward()
    o.step()
    o.zero_grad()
m.save_pretrained("output/orpo")
