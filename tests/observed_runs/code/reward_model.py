from tiny import *
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

model = AutoModelForSequenceClassification.from_pretrained(BASE, num_labels=1)
trainer = RewardTrainer(
    model, args=RewardConfig(**SMALL), train_dataset=pairs(), processing_class=AutoTokenizer.from_pretrained(BASE)
)
trainer.train()
trainer.save_model("output/reward")
