
import os
from trl import GRPOTrainer, GRPOConfig
cfg=GRPOConfig("o",max_steps=int(os.environ.get("STEPS","0")),num_train_epochs=0,learning_rate=0.0)
t=GRPOTrainer("models/base",reward_funcs=[lambda completions,**k:[0.0]*len(completions)],args=cfg,train_dataset=None)
t.train(); t.save_model("output/v1")
