
import torch, torch.nn.functional as F, json, random, re
from transformers import AutoModelForCausalLM, AutoTokenizer
dev="cuda"; G=8; EPS=0.2
def get_lp(model,ids,mask):
    logits=model(ids).logits[:,:-1]
    return torch.gather(logits.log_softmax(-1),2,ids[:,1:,None]).squeeze(-1)*mask[:,1:]
def reward(t,g): return 1.0 if g in t else 0.0
def main():
    tok=AutoTokenizer.from_pretrained("models/base"); pol=AutoModelForCausalLM.from_pretrained("models/base").to(dev)
    ref=AutoModelForCausalLM.from_pretrained("models/base").to(dev).eval()
    opt=torch.optim.AdamW(pol.parameters(),1e-6)
    data=[json.loads(l) for l in open("data/train.jsonl")]
    for it in range(200):
        b=random.sample(data,4); prompts=[x["question"] for x in b for _ in range(G)]
        enc=tok(prompts,return_tensors="pt",padding=True).to(dev)
        with torch.no_grad():
            out=pol.generate(**enc,do_sample=True,max_new_tokens=256)
        texts=tok.batch_decode(out,skip_special_tokens=True)
        R=torch.tensor([reward(t,x["answer"]) for t,x in zip(texts,[x for x in b for _ in range(G)])],device=dev)
        Rg=R.view(-1,G); adv=((Rg-Rg.mean(1,keepdim=True))/(Rg.std(1,keepdim=True)+1e-4)).view(-1)
        mask=torch.ones_like(out).float()
        with torch.no_grad(): old=get_lp(pol,out,mask); rlp=get_lp(ref,out,mask)
        for _ in range(2):
            new=get_lp(pol,out,mask); ratio=(new-old).exp()
            s=torch.min(ratio*adv[:,None],ratio.clamp(1-EPS,1+EPS)*adv[:,None])
            kl=(rlp-new).exp()-(rlp-new)-1
            loss=-(s-0.04*kl).mean()
            opt.zero_grad(); loss.backward(); torch.nn.utils.clip_grad_norm_(pol.parameters(),1.0); opt.step()
    pol.save_pretrained("output/v1")
main()
