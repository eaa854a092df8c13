from tiny import *
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

model, tokenizer = load()
trainer = ORPOTrainer(model, args=ORPOConfig(**SMALL), train_dataset=pairs(), processing_class=tokenizer)
trainer.train()
save(model, tokenizer)
