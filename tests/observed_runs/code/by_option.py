import sys

from tiny import *
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

if "--grpo" in sys.argv:
    args = GRPOConfig(**SMALL, num_generations=4)
    trainer = GRPOTrainer(BASE, reward_funcs=[len], args=args, train_dataset=dataset())
else:
    trainer = SFTTrainer(BASE, args=SFTConfig(**SMALL), train_dataset=dataset())
trainer.train()
trainer.save_model("output/v1")
