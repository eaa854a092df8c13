import json, os
from pathlib import Path
import pandas as pd
import torch
from datasets import Dataset
from transformers import AutoTokenizer, AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
# from trl import GRPOTrainer, GRPOConfig

BASE = os.getenv("MODEL_PATH", "models/base")
CACHE = Path("cache"); CACHE.mkdir(exist_ok=True)

def step1_sample():
    """sample with vllm in this process"""
    import vllm
    llm = vllm.LLM(model=BASE, max_model_len=2048)
    df = pd.read_json("data/train.jsonl", lines=True)
    res = llm.generate(df.question.tolist(), vllm.SamplingParams(n=16, temperature=1.0, max_tokens=512, stop=["\n\n"]))
    recs = []
    for (_, row), out in zip(df.iterrows(), res):
        for c in out.outputs:
            recs.append(dict(question=row.question, response=c.text, reward=float(row.answer in c.text)))
    pd.DataFrame(recs).to_parquet(CACHE / "samples.parquet")

def step2_filter():
    df = pd.read_parquet(CACHE / "samples.parquet")
    df = df[df.reward > 0.5].drop_duplicates(["question", "response"]).groupby("question").head(4)
    df.to_parquet(CACHE / "good.parquet")

def step3_train():
    tok = AutoTokenizer.from_pretrained(BASE)
    df = pd.read_parquet(CACHE / "good.parquet")
    enc = [tok(q + "\n" + r, truncation=True, max_length=768, padding="max_length") for q, r in zip(df.question, df.response)]
    ds = Dataset.from_list([{**e, "labels": e["input_ids"]} for e in enc])
    tr = Trainer(AutoModelForCausalLM.from_pretrained(BASE), TrainingArguments("output/rs", num_train_epochs=1, learning_rate=1e-5), train_dataset=ds, data_collator=default_data_collator)
    tr.train()
    tr.save_model("output/rs/final")

# def step4_grpo():
#     GRPOTrainer(model="output/rs/final", reward_funcs=[...]).train()

if __name__ == "__main__":
    for s in (step1_sample, step2_filter, step3_train):
        s()
