
"""usage: GRPOTrainer(...).train()"""
import sys
from trl import GRPOTrainer, GRPOConfig, SFTTrainer, SFTConfig
USE_RL = False
def go():
    s=SFTTrainer("m",args=SFTConfig("o")); s.train()
    if not USE_RL: return s
    GRPOTrainer("o",reward_funcs=[],args=GRPOConfig("o2")).train()
go()
