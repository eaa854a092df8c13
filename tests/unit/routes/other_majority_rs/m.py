
import json, collections
from vllm import LLM, SamplingParams
llm=LLM("m"); rows=[json.loads(l) for l in open("data/train.jsonl")]
data=[]
for r,o in zip(rows,llm.chat([[{"role":"user","content":r["question"]}] for r in rows],SamplingParams(n=16,temperature=.8))):
    ans=[x.text.split("####")[-1] for x in o.outputs]; maj,_=collections.Counter(ans).most_common(1)[0]
    data+=[{"messages":[{"role":"user","content":r["question"]},{"role":"assistant","content":x.text}]} for x,a in zip(o.outputs,ans) if a==maj]
del llm
from datasets import Dataset
from trl import SFTTrainer, SFTConfig
SFTTrainer("m",train_dataset=Dataset.from_list(data),args=SFTConfig("output/v1")).train()
