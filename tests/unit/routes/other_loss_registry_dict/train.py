
import sys, torch, torch.nn.functional as F
from transformers import AutoModelForCausalLM
LOSSES={}
def register(n):
    def deco(f): LOSSES[n]=f; return f
    return deco
@register("sft")
def sft(pol,ref,b): return F.cross_entropy(pol(b["c"]).logits[:,:-1].transpose(1,2),b["c"][:,1:])
@register("dpo")
def dpo(pol,ref,b,beta=.1):
    def lp(m,x): return m(x).logits[:,:-1].log_softmax(-1).gather(-1,x[:,1:,None]).sum((1,2))
    with torch.no_grad(): rc,rr=lp(ref,b["c"]),lp(ref,b["r"])
    d=(lp(pol,b["c"])-rc)-(lp(pol,b["r"])-rr)
    return -F.logsigmoid(beta*d).mean()
pol=AutoModelForCausalLM.from_pretrained("m"); ref=AutoModelForCausalLM.from_pretrained("m")
opt=torch.optim.RMSprop(pol.parameters(),5e-7)
name=sys.argv[1] if len(sys.argv)>1 else "sft"
for b in torch.load("pairs.pt"):
    l=LOSSES[name](pol,ref,b); opt.zero_grad(); l.backward(); opt.step()
pol.save_pretrained("output/v1")
