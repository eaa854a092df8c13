
from trl import RewardTrainer, RewardConfig
RewardTrainer("m",args=RewardConfig("rm")).train()
