from tiny import *
from trl import SFTConfig, SFTTrainer

teacher, tokenizer = load("models/teacher")
_, answers = sample(teacher, tokenizer, [row["prompt"] for row in ROWS], temperature=0.7)
rows = [{"prompt": row["prompt"], "completion": answer or " 0"} for row, answer in zip(ROWS, answers)]
trainer = SFTTrainer(BASE, args=SFTConfig(**SMALL), train_dataset=dataset(rows))
trainer.train()
trainer.save_model("output/v1")
