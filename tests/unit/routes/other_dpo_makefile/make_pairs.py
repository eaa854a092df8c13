
import json
from vllm import LLM,SamplingParams
llm=LLM("models/base"); rows=[json.loads(l) for l in open("data/train.jsonl")]
o=llm.generate([r["question"] for r in rows],SamplingParams(n=4))
with open("pairs.jsonl","w") as f:
    for r,x in zip(rows,o):
        good=[t.text for t in x.outputs if r["answer"] in t.text]; bad=[t.text for t in x.outputs if r["answer"] not in t.text]
        if good and bad: f.write(json.dumps(dict(prompt=r["question"],chosen=good[0],rejected=bad[0]))+"\n")
