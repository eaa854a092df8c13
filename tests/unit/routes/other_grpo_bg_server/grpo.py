
from trl import GRPOTrainer, GRPOConfig
from datasets import load_dataset
import re
def acc(completions, answer, **kw): return [float(a in c) for c,a in zip(completions,answer)]
if __name__ == "__main__":
    tr=GRPOTrainer("m",reward_funcs=[acc],args=GRPOConfig("o",use_vllm=True,vllm_mode="server"),train_dataset=load_dataset("json",data_files="d.jsonl")["train"])
    tr.train()
