
import torch, torch.nn as nn
from transformers import AutoModelForCausalLM, AutoTokenizer
class AC(nn.Module):
    def __init__(s,p):
        super().__init__(); s.lm=AutoModelForCausalLM.from_pretrained(p); s.v=nn.Linear(s.lm.config.hidden_size,1)
    def forward(s,ids):
        o=s.lm(ids,output_hidden_states=True); return o.logits, s.v(o.hidden_states[-1]).squeeze(-1)
def gae(rew,val,g=1.,l=.95):
    adv=torch.zeros_like(rew); last=0
    for t in reversed(range(rew.size(1))):
        nv=val[:,t+1] if t+1<rew.size(1) else 0
        d=rew[:,t]+g*nv-val[:,t]; last=d+g*l*last; adv[:,t]=last
    return adv, adv+val
def train(ac,opt,batches,score):
    for ids,mask in batches:
        with torch.no_grad():
            gen=ac.lm.generate(ids,do_sample=True,max_new_tokens=64); lg,v=ac(gen)
            old=lg.log_softmax(-1)[:,:-1].gather(-1,gen[:,1:,None]).squeeze(-1); rew=torch.zeros_like(old); rew[:,-1]=score(gen)
            adv,ret=gae(rew,v[:,:-1])
        for _ in range(4):
            lg,v=ac(gen); lp=lg.log_softmax(-1)[:,:-1].gather(-1,gen[:,1:,None]).squeeze(-1)
            r=torch.exp(lp-old); pg=torch.max(-adv*r,-adv*torch.clamp(r,.8,1.2)).mean(); vf=((v[:,:-1]-ret)**2).mean()
            (pg+.5*vf).backward(); opt.step(); opt.zero_grad()
if __name__=="__main__":
    ac=AC("models/base"); tok=AutoTokenizer.from_pretrained("models/base"); opt=torch.optim.Adam(ac.parameters(),1e-6)
    train(ac,opt,[(tok("a",return_tensors="pt").input_ids,None)]*100,lambda g: torch.ones(g.size(0)))
    ac.lm.save_pretrained("output/v1")
