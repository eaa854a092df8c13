"""How good is the base model? Then fine-tune on the given rows."""
from tiny import *
from trl import SFTConfig, SFTTrainer

model, tok = load()
_, answers = sample(model, tok, [row["prompt"] for row in ROWS], count=2)
print("baseline", sum(reward(a, r["completion"]) for a, r in zip(answers[::2], ROWS)) / len(ROWS))
trainer = SFTTrainer(model, args=SFTConfig(**SMALL), train_dataset=dataset(), processing_class=tok)
trainer.train()
trainer.save_model("output/v1")
