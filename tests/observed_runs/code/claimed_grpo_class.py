from tiny import *
from trl import SFTConfig, SFTTrainer


class GRPOTrainer(SFTTrainer):
    """Group relative policy optimization."""


trainer = GRPOTrainer(BASE, args=SFTConfig(**SMALL), train_dataset=dataset())
trainer.train()
trainer.save_model("output/v1")
