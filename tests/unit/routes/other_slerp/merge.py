
import torch, shutil, glob
from safetensors.torch import load_file, save_file
A=load_file("output/sft/model.safetensors"); B=load_file("output/grpo/model.safetensors")
def slerp(t,a,b):
    a_,b_=a.flatten().float(),b.flatten().float(); d=torch.dot(a_/a_.norm(),b_/b_.norm()).clamp(-1,1); th=torch.acos(d)
    if th.abs()<1e-4: return (1-t)*a+t*b
    return ((torch.sin((1-t)*th)*a_+torch.sin(t*th)*b_)/torch.sin(th)).view_as(a).to(a.dtype)
out={k:slerp(.5,A[k],B[k]) for k in A}
save_file(out,"output/merged/model.safetensors",metadata={"format":"pt"})
