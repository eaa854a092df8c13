
import json,re,random
from vllm import LLM, SamplingParams
def extract(t):
    m=re.findall(r"####\s*(-?[\d,.]+)",t); return m[-1].replace(",","") if m else None
def main():
    rows=[json.loads(l) for l in open("data/train.jsonl")]
    llm=LLM("models/base",gpu_memory_utilization=.9)
    outs=llm.generate([r["question"] for r in rows],SamplingParams(n=8,temperature=1.0,max_tokens=400))
    kept=[]
    for r,o in zip(rows,outs):
        gold=extract(r["answer"]); seen=set()
        for s in o.outputs:
            if extract(s.text)==gold and s.text not in seen:
                seen.add(s.text); kept.append({"prompt":r["question"],"completion":s.text})
    random.shuffle(kept)
    with open("data/rft.jsonl","w") as f:
        for k in kept: f.write(json.dumps(k)+"\n")
main()
