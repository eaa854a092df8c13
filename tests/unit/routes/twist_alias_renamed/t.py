import trl as R
from trl import GRPOTrainer as SupervisedTrainer, GRPOConfig as SFTArgs
from datasets import load_dataset as L


def sft_loss_weight(completions, answer, **k):
    return [float(a in c) for a, c in zip(answer, completions)]


d = L("json", data_files="data/train.jsonl", split="train")
x = SupervisedTrainer("models/base", sft_loss_weight, args=SFTArgs("out", num_generations=4), train_dataset=d)
x.train()
