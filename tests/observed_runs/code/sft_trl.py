from tiny import *
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(BASE, args=SFTConfig(**SMALL, learning_rate=2e-4, warmup_steps=1), train_dataset=dataset())
trainer.train()
trainer.save_model("output/v1")
