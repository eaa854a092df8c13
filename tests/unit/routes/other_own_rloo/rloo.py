
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tok=AutoTokenizer.from_pretrained("m"); m=AutoModelForCausalLM.from_pretrained("m"); opt=torch.optim.AdamW(m.parameters(),1e-6); K=4
import json
for l in open("data/train.jsonl"):
    ex=json.loads(l); e=tok(ex["question"],return_tensors="pt"); P=e.input_ids.shape[1]
    with torch.no_grad(): s=m.generate(**e,do_sample=True,num_return_sequences=K,max_new_tokens=128)
    r=torch.tensor([float(ex["answer"].split("####")[1].strip() in t) for t in tok.batch_decode(s[:,P:])])
    base=(r.sum()-r)/(K-1); adv=r-base
    lp=m(s).logits[:,:-1].log_softmax(-1).gather(-1,s[:,1:,None]).squeeze(-1)[:,P-1:].sum(-1)
    loss=-(adv*lp).mean(); opt.zero_grad(); loss.backward(); opt.step()
m.save_pretrained("output/v1")
