from tiny import *
from trl import SFTConfig, SFTTrainer

model, tokenizer = load()
for round in range(2):
    _, answers = sample(model, tokenizer, [row["prompt"] for row in ROWS for _ in range(2)])
    rows = [r for r in ROWS for _ in range(2)]
    correct = [
        {"prompt": r["prompt"], "completion": a} for r, a in zip(rows, answers) if reward(a, r["completion"]) > 0.1
    ]
    trainer = SFTTrainer(model, args=SFTConfig(**SMALL), train_dataset=dataset(correct), processing_class=tokenizer)
    trainer.train()
save(model, tokenizer)
