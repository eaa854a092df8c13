from tiny import *
from trl import SFTConfig, SFTTrainer

trainer = SFTTrainer(BASE, args=SFTConfig(**SMALL), train_dataset=dataset(read("data/kd.jsonl")))
trainer.train()
trainer.save_model("output/v1")
