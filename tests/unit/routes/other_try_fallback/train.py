
import traceback
from trl import SFTTrainer, GRPOTrainer, SFTConfig, GRPOConfig
def run_grpo():
    t=GRPOTrainer(model="m",reward_funcs=[lambda completions,**k:[len(c) for c in completions]],args=GRPOConfig("o",max_steps=100)); t.train(); t.save_model("output/g")
def run_sft():
    t=SFTTrainer(model="m",args=SFTConfig("o")); t.train(); t.save_model("output/s")
try: run_grpo()
except Exception: traceback.print_exc(); run_sft()
