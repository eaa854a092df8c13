
import json, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
m=AutoModelForCausalLM.from_pretrained("m"); tok=AutoTokenizer.from_pretrained("m"); opt=torch.optim.AdamW(m.parameters(),1e-5)
rows=[json.loads(l) for l in open("data/train.jsonl")]
hard=[]
for r in rows:
    g=tok.decode(m.generate(**tok(r["question"],return_tensors="pt"),max_new_tokens=64)[0])
    if r["answer"].split()[-1] not in g: hard.append(r)      # only what the model gets wrong; gold answers
for r in hard:
    ids=tok(r["question"]+r["answer"],return_tensors="pt").input_ids
    loss=m(ids,labels=ids).loss; loss.backward(); opt.step(); opt.zero_grad()
m.save_pretrained("output/v1")
