from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
import os

SFTTrainer(
    model=os.environ["MODEL_PATH"],
    train_dataset=load_dataset("json", data_files="data/self_correct.jsonl", split="train"),
    args=SFTConfig(output_dir="output/rs", learning_rate=5e-6, num_train_epochs=2, assistant_only_loss=True),
).train()
