import sys

from algos import REGISTRY

REGISTRY[sys.argv[1]]("models/base", "data/train.jsonl").run()
