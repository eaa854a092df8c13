
import argparse, torch, json
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup
def main(a):
    acc=Accelerator(gradient_accumulation_steps=a.ga); tok=AutoTokenizer.from_pretrained(a.model)
    model=AutoModelForCausalLM.from_pretrained(a.model,torch_dtype=torch.bfloat16)
    rows=[json.loads(l) for l in open(a.data)]
    def coll(b):
        e=tok([x["question"]+x["answer"] for x in b],return_tensors="pt",padding=True); lab=e.input_ids.clone(); lab[e.attention_mask==0]=-100; e["labels"]=lab; return e
    dl=DataLoader(rows,batch_size=a.bs,shuffle=True,collate_fn=coll); opt=torch.optim.AdamW(model.parameters(),lr=a.lr)
    sch=get_cosine_schedule_with_warmup(opt,10,1000); model,opt,dl,sch=acc.prepare(model,opt,dl,sch)
    for ep in range(a.epochs):
        for b in dl:
            with acc.accumulate(model):
                loss=model(**b).loss; acc.backward(loss); opt.step(); sch.step(); opt.zero_grad()
    acc.unwrap_model(model).save_pretrained(a.out)
p=argparse.ArgumentParser()
for n,d in dict(model="models/base",data="data/train.jsonl",out="output/v1").items(): p.add_argument("--"+n,default=d)
p.add_argument("--ga",type=int,default=4);p.add_argument("--bs",type=int,default=4);p.add_argument("--lr",type=float,default=1e-5);p.add_argument("--epochs",type=int,default=1)
main(p.parse_args())
