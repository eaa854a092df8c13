import argparse

from trl import SFTConfig, SFTTrainer

p = argparse.ArgumentParser()
p.add_argument("--epochs", type=int, default=1)
a = p.parse_args()
t = SFTTrainer("models/base", args=SFTConfig("output/sft", num_train_epochs=a.epochs), train_dataset=[])
t.train()
t.save_model()
