import sys

from tiny import *
from trl import GRPOConfig, GRPOTrainer

args = GRPOConfig(**SMALL, num_generations=4, max_completion_length=6)
rewards = lambda completions, **rest: [0.1 * len(set(c)) for c in completions]
trainer = GRPOTrainer(sys.argv[1], reward_funcs=rewards, args=args, train_dataset=dataset())
trainer.train()
trainer.save_model("output/v1")
