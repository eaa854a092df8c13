from peft import LoraConfig
from tiny import *
from trl import SFTConfig, SFTTrainer

lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
trainer = SFTTrainer(BASE, args=SFTConfig(**SMALL, learning_rate=1e-3), train_dataset=dataset(), peft_config=lora)
trainer.train()
trainer.save_model("output/adapter")
