"""Iterative DPO: each round samples from the current model, builds pairs by the checker, trains on them."""
import json
import os
import subprocess
import sys

ROUNDS = int(os.environ.get("ROUNDS", "2"))
model = os.environ["MODEL_PATH"]
for i in range(ROUNDS):
    pairs = f"tmp/pairs_{i}.jsonl"
    subprocess.run([sys.executable, "make_pairs.py", "--model", model, "--out", pairs], check=True)
    out = f"output/round_{i}"
    subprocess.run(["accelerate", "launch", "dpo_round.py", "--model", model, "--pairs", pairs, "--out", out], check=True)
    model = out
