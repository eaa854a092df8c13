from tiny import *
from trl import DPOConfig, DPOTrainer

trainer = DPOTrainer(BASE, args=DPOConfig(**SMALL, beta=0.2, learning_rate=1e-5), train_dataset=pairs())
trainer.train()
trainer.save_model("output/v1")
