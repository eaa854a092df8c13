from tiny import *
from trl import GRPOConfig, GRPOTrainer


class Ours(GRPOTrainer):
    def log(self, logs, *rest):
        super().log({**logs, "ours": 1.0}, *rest)


args = GRPOConfig(**SMALL, num_generations=4, max_completion_length=6)
trainer = Ours(
    BASE,
    reward_funcs=lambda completions, **rest: [0.1 * len(set(c)) for c in completions],
    args=args,
    train_dataset=dataset(),
)
trainer.train()
trainer.save_model("output/v1")
