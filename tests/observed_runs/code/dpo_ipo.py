from tiny import *
from trl import DPOConfig, DPOTrainer

trainer = DPOTrainer(BASE, args=DPOConfig(**SMALL, loss_type=["ipo"]), train_dataset=pairs())
trainer.train()
trainer.save_model("output/v1")
