from peft import LoraConfig
from trl import KTOConfig, KTOTrainer

trainer = KTOTrainer(model="models/base", args=KTOConfig("out", beta=0.1), train_dataset=[], peft_config=LoraConfig(r=8))
trainer.train()
trainer.save_model("out")
