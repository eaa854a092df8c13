import argparse
from datasets import load_dataset
import trl

def cli():
    ap = argparse.ArgumentParser()
    for n in ("model", "pairs", "out"):
        ap.add_argument("--" + n, required=True)
    return ap.parse_args()

a = cli()
tr = trl.DPOTrainer(a.model, args=trl.DPOConfig(a.out, beta=0.05, learning_rate=1e-6), train_dataset=load_dataset("json", data_files=a.pairs, split="train"))
tr.train(); tr.save_model(a.out)
