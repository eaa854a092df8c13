
import torch, json, copy
from transformers import AutoModelForCausalLM, AutoTokenizer
from utils import is_correct, sft_epoch
tok=AutoTokenizer.from_pretrained("models/base"); model=AutoModelForCausalLM.from_pretrained("models/base").cuda()
data=[json.loads(l) for l in open("data/train.jsonl")]
for rnd in range(3):
    buf=[]
    model.eval()
    for ex in data[:500]:
        e=tok(ex["question"],return_tensors="pt").to("cuda")
        out=model.generate(**e,do_sample=True,num_return_sequences=4,max_new_tokens=200)
        for t in tok.batch_decode(out[:,e.input_ids.shape[1]:],skip_special_tokens=True):
            if is_correct(t,ex["answer"]): buf.append((ex["question"],t))
    model.train()
    sft_epoch(model,tok,buf)
    model.save_pretrained(f"output/r{rnd}")
