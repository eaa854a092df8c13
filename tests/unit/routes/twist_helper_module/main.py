import argparse

from lib.train_lib import build, fit

if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=100)
    args = p.parse_args()
    fit(build("models/base", args.steps))
