from tiny import *
from trl.experimental.gkd import GKDConfig, GKDTrainer

rows = [
    {"messages": [{"role": "user", "content": r["prompt"]}, {"role": "assistant", "content": r["completion"]}]}
    for r in ROWS
]
model, tokenizer = load()
trainer = GKDTrainer(
    model,
    teacher_model="models/teacher",
    args=GKDConfig(**SMALL, max_new_tokens=6, lmbda=0.0),
    train_dataset=dataset(rows),
    processing_class=tokenizer,
)
trainer.train()
save(model, tokenizer)
