
import argparse
from trl import RLOOTrainer, RLOOConfig
a=argparse.ArgumentParser(); a.add_argument("--model"); a=a.parse_args()
RLOOTrainer(a.model,reward_funcs=[len],args=RLOOConfig("output/rl")).train()
