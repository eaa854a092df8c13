CODE = """
from trl import SFTTrainer, SFTConfig
from datasets import load_dataset
t = SFTTrainer(model="models/base", args=SFTConfig("out", learning_rate=1e-5), train_dataset=load_dataset("json", data_files="d.jsonl")["train"])
t.train()
t.save_model("out")
"""
exec(compile(CODE, "x", "exec"))
