from trl import SFTTrainer
SFTTrainer("m").train()
