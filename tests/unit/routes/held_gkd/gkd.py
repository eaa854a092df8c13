import os
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GKDConfig, GKDTrainer

tok = AutoTokenizer.from_pretrained(os.environ["MODEL_PATH"])
ds = load_dataset("json", data_files="data/messages.jsonl", split="train").train_test_split(0.02)
args = GKDConfig(output_dir="output/gkd", lmbda=0.5, beta=0.5, learning_rate=1e-5, max_steps=400)
trainer = GKDTrainer(model=os.environ["MODEL_PATH"], teacher_model="models/teacher-7b", args=args, processing_class=tok, train_dataset=ds["train"], eval_dataset=ds["test"])
trainer.train()
trainer.save_model()
