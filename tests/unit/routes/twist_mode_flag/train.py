import argparse

from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer


def run_sft(a):
    SFTTrainer(model=a.model, args=SFTConfig(a.out, learning_rate=a.lr), train_dataset=a.data).train()


def run_dpo(a):
    DPOTrainer(model=a.model, args=DPOConfig(a.out, learning_rate=a.lr), train_dataset=a.data).train()


def run_grpo(a):
    GRPOTrainer(model=a.model, reward_funcs=[len], args=GRPOConfig(a.out, learning_rate=a.lr), train_dataset=a.data).train()


METHODS = {"sft": run_sft, "dpo": run_dpo, "grpo": run_grpo}

if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--method", choices=list(METHODS), required=True)
    ap.add_argument("--model", default="models/base")
    ap.add_argument("--out", default="output/m")
    ap.add_argument("--lr", type=float, default=1e-6)
    ap.add_argument("--data")
    args = ap.parse_args()
    METHODS[args.method](args)
