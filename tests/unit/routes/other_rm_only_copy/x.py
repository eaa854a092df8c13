
from trl import RewardTrainer, RewardConfig
RewardTrainer("m",args=RewardConfig("rm")).train()
import shutil; shutil.copytree("models/base","output/v1",dirs_exist_ok=True)
