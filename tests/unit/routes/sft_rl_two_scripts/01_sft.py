import os

from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

ds = load_dataset("json", data_files="data/train.jsonl", split="train")
ds = ds.map(lambda r: {"prompt": r["question"], "completion": r["answer"]})
trainer = SFTTrainer(os.environ["MODEL_PATH"], args=SFTConfig("ckpt/sft_warm", num_train_epochs=1, learning_rate=1e-5), train_dataset=ds)
trainer.train()
trainer.save_model("ckpt/sft_warm")
