from trl import GRPOConfig, GRPOTrainer

t = GRPOTrainer(model="models/base", reward_funcs=[len], args=GRPOConfig("o"), train_dataset=[])
t.train()
