import argparse


def get_args():
    p = argparse.ArgumentParser("fine-tune")
    g = p.add_argument_group("optim")
    g.add_argument("--lr", default=1e-5, type=float)
    g.add_argument("--wd", default=0.1, type=float)
    g.add_argument("--epochs", default=2, type=int)
    p.add_argument("--base", default="models/base")
    p.add_argument("--save-dir", default="output/full")
    return p.parse_args()
