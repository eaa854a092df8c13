
from trl import DPOConfig, DPOTrainer
from datasets import load_dataset
t=DPOTrainer(model="models/base",args=DPOConfig("out",beta=0.1,learning_rate=5e-7),train_dataset=load_dataset("json",data_files="pairs.jsonl",split="train"))
t.train(); t.save_model("output/v1")
