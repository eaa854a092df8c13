
import torch
def final(t): return t.split("####")[-1].strip()
def is_correct(t,g): return final(t)==final(g)
def sft_epoch(model,tok,buf,lr=1e-5):
    opt=torch.optim.AdamW(model.parameters(),lr=lr)
    for q,a in buf:
        ids=tok(q+a+tok.eos_token,return_tensors="pt").input_ids.cuda()
        out=model(ids,labels=ids); out.loss.backward(); opt.step(); opt.zero_grad()
