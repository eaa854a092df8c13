
import torch, json, os
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, DataCollatorForLanguageModeling
MODEL=os.environ["MODEL_PATH"]
tok=AutoTokenizer.from_pretrained(MODEL)
model=get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), LoraConfig(r=64,lora_alpha=128,target_modules="all-linear"))
rows=[json.loads(l) for l in open("data/train.jsonl")]
ds=Dataset.from_list([{"text":r["question"]+"\n"+r["answer"]} for r in rows]).map(lambda b: tok(b["text"],truncation=True,max_length=512), remove_columns=["text"])
tr=Trainer(model,TrainingArguments("out",learning_rate=2e-4,num_train_epochs=2,per_device_train_batch_size=8),train_dataset=ds,data_collator=DataCollatorForLanguageModeling(tok,mlm=False))
tr.train()
m=tr.model.merge_and_unload(); m.save_pretrained("output/v1"); tok.save_pretrained("output/v1")
