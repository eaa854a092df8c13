from trl import DPOConfig, DPOTrainer

t = DPOTrainer(model="models/base", args=DPOConfig("o", loss_type="sigmoid"), train_dataset=[])
t.train()
