import trl

from .rewards import exact


def build(path, steps):
    cfg = trl.GRPOConfig(output_dir="out", max_steps=steps, learning_rate=2e-6)
    return trl.GRPOTrainer(model=path, reward_funcs=[exact], args=cfg, train_dataset=_data())


def _data():
    from datasets import load_dataset

    return load_dataset("json", data_files="data/train.jsonl", split="train")


def fit(trainer):
    trainer.train()
    trainer.save_model("out/final")
