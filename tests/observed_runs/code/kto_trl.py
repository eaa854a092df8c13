from tiny import *
from trl import KTOConfig, KTOTrainer

rows = [
    {"prompt": r["prompt"], "completion": c, "label": c == r["completion"]}
    for r in ROWS
    for c in (r["completion"], " no")
]
trainer = KTOTrainer(BASE, args=KTOConfig(**SMALL), train_dataset=dataset(rows))
trainer.train()
trainer.save_model("output/v1")
