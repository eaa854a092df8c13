from tiny import *
from trl import GRPOConfig, GRPOTrainer


def right(prompts, completions, gold, **rest):
    return [reward(made, answer) for made, answer in zip(completions, gold)]


rows = [{"prompt": row["prompt"], "gold": row["completion"]} for row in ROWS]
args = GRPOConfig(**SMALL, num_generations=4, max_completion_length=6, learning_rate=1e-5)
trainer = GRPOTrainer(BASE, reward_funcs=right, args=args, train_dataset=dataset(rows))
trainer.train()
trainer.save_model("output/v1")
