from tiny import *
from trl import SFTConfig, SFTTrainer

model, tokenizer = load()
kept = []
for row in ROWS[:8]:
    _, answers = sample(model, tokenizer, [row["prompt"]], count=4)
    best = max(answers, key=lambda answer: reward(answer, row["completion"]))
    if reward(best, row["completion"]) > 0:
        kept.append({"prompt": row["prompt"], "completion": best or " 1"})
trainer = SFTTrainer(model, args=SFTConfig(**SMALL), train_dataset=dataset(kept), processing_class=tokenizer)
trainer.train()
trainer.save_model("output/v1")
