from tiny import *
from trl import RLOOConfig, RLOOTrainer

args = RLOOConfig(**SMALL, num_generations=2, max_completion_length=6)
trainer = RLOOTrainer(
    BASE,
    reward_funcs=lambda completions, **rest: [0.1 * len(set(c)) for c in completions],
    args=args,
    train_dataset=dataset(),
)
trainer.train()
trainer.save_model("output/v1")
