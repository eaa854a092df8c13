
import os, sys
from trl import SFTTrainer, SFTConfig
t=SFTTrainer("m",args=SFTConfig("output/sft")); t.train(); t.save_model()
os.execv(sys.executable,[sys.executable,"two.py","--model","output/sft"])
