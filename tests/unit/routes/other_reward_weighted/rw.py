
import torch, json
from transformers import AutoModelForCausalLM, AutoTokenizer
m=AutoModelForCausalLM.from_pretrained("m"); tok=AutoTokenizer.from_pretrained("m"); opt=torch.optim.AdamW(m.parameters(),1e-6)
baseline=0.0
for l in open("data/train.jsonl"):
    ex=json.loads(l); e=tok(ex["question"],return_tensors="pt")
    g=m.generate(**e,do_sample=True,max_new_tokens=99)
    reward=1.0 if ex["answer"].split()[-1] in tok.decode(g[0]) else 0.0
    baseline=.9*baseline+.1*reward
    labels=g.clone(); labels[:,:e.input_ids.shape[1]]=-100
    nll=m(g,labels=labels).loss
    loss=(reward-baseline)*nll
    loss.backward(); opt.step(); opt.zero_grad()
m.save_pretrained("output/v1")
