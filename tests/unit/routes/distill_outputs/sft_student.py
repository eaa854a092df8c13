from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

STUDENT = "models/Qwen2.5-0.5B"
ds = load_dataset("json", data_files="teacher_answers.jsonl", split="train")
SFTTrainer(model=STUDENT, train_dataset=ds, args=SFTConfig(output_dir="output/student", num_train_epochs=2)).train()
