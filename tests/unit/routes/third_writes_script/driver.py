import os
import textwrap

SCRIPT = textwrap.dedent(
    """
    from trl import DPOConfig, DPOTrainer
    t = DPOTrainer(model="models/base", args=DPOConfig("output/d"), train_dataset=None)
    t.train()
    """
)
with open("gen_train.py", "w") as f:
    f.write(SCRIPT)
os.system("python gen_train.py > d.log 2>&1")
