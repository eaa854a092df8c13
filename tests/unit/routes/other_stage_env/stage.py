
import os
from trl import *
stage=os.environ["STAGE"]
if stage=="sft":
    t=SFTTrainer(model=os.environ["MODEL"],args=SFTConfig(os.environ["OUT"]))
elif stage=="rl":
    t=GRPOTrainer(model=os.environ["MODEL"],reward_funcs=lambda completions,**k:[1.]*len(completions),args=GRPOConfig(os.environ["OUT"]))
else: raise SystemExit(stage)
t.train(); t.save_model(os.environ["OUT"])
