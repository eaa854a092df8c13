
from trl import SFTTrainer, GRPOTrainer, SFTConfig, GRPOConfig
def build(kind):
    if kind=="grpo":
        return GRPOTrainer(model="m",reward_funcs=[r],args=GRPOConfig("o"))
    return SFTTrainer(model="m",args=SFTConfig("o"))
def r(completions,**k): return [1.0 for _ in completions]
trainer=build("grpo")
trainer=build("sft")
trainer.train()
