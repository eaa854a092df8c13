import argparse

from trl import GRPOConfig, GRPOTrainer

p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=100)
a = p.parse_args()
t = GRPOTrainer("output/sft", [len], args=GRPOConfig("output/rl", max_steps=a.steps), train_dataset=[])
t.train()
t.save_model()
