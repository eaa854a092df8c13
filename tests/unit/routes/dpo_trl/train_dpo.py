import os

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

path = os.environ["MODEL_PATH"]
model = AutoModelForCausalLM.from_pretrained(path, torch_dtype="bfloat16")
tok = AutoTokenizer.from_pretrained(path)
ds = load_dataset("json", data_files="pairs.jsonl", split="train")
cfg = DPOConfig(output_dir="output/dpo", beta=0.1, learning_rate=5e-7, num_train_epochs=1, per_device_train_batch_size=4, gradient_accumulation_steps=8)
trainer = DPOTrainer(model=model, args=cfg, train_dataset=ds, processing_class=tok)
trainer.train()
trainer.save_model("output/dpo/final")
