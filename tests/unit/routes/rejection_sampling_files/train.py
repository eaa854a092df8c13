import os

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainingArguments

MODEL = os.environ["MODEL_PATH"]
tok = AutoTokenizer.from_pretrained(MODEL)
ds = load_dataset("json", data_files="work/kept.jsonl", split="train")
ds = ds.map(lambda r: tok(r["prompt"] + r["completion"] + tok.eos_token, truncation=True, max_length=1024), remove_columns=ds.column_names)
model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=torch.bfloat16)
args = TrainingArguments("output/rft", learning_rate=1e-5, num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=8, bf16=True)
Trainer(model=model, args=args, train_dataset=ds, data_collator=DataCollatorForLanguageModeling(tok, mlm=False)).train()
model.save_pretrained("output/rft")
tok.save_pretrained("output/rft")
