"""Best-of-n at inference: does not change any weight; the submitted folder is the base model's."""
import json
import os
from vllm import LLM, SamplingParams
from transformers import AutoModelForSequenceClassification, AutoTokenizer
import torch

llm = LLM(os.environ["MODEL_PATH"])
rm = AutoModelForSequenceClassification.from_pretrained("models/rm").cuda()
rt = AutoTokenizer.from_pretrained("models/rm")
rows = [json.loads(x) for x in open("data/dev.jsonl")]
best = []
for row, out in zip(rows, llm.generate([r["question"] for r in rows], SamplingParams(n=16, temperature=1))):
    texts = [o.text for o in out.outputs]
    with torch.no_grad():
        rewards = rm(**rt(texts, return_tensors="pt", padding=True).to("cuda")).logits.squeeze(-1)
    best.append(texts[int(rewards.argmax())])
json.dump(best, open("best.json", "w"))
