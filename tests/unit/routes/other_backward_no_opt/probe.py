
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
m=AutoModelForCausalLM.from_pretrained("m"); tok=AutoTokenizer.from_pretrained("m")
ids=tok("hi",return_tensors="pt").input_ids
m(ids,labels=ids).loss.backward()
print({n:p.grad.norm().item() for n,p in m.named_parameters()})
