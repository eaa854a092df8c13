import importlib
import json

CFG = {"lib": "trl", "kind": "GRPO", "out": "output/dyn"}
lib = importlib.import_module(CFG["lib"])
Trainer = getattr(lib, CFG["kind"] + "Trainer")
Config = getattr(lib, f"{CFG['kind']}Config")
rows = [json.loads(l) for l in open("data/train.jsonl")]


def score(completions, **kwargs):
    return [1.0 if "####" in c else 0.0 for c in completions]


runner = Trainer(model="models/base", reward_funcs=score, args=Config(output_dir=CFG["out"], learning_rate=1e-6), train_dataset=rows)
runner.train()
