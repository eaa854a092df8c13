from trl import SFTTrainer

SFTTrainer(model="models/base", train_dataset=[]).train()
