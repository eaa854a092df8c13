from tiny import *
from transformers import Trainer, TrainingArguments

model, tokenizer = load()
rows = [{k: v[0] for k, v in batch(tokenizer, [text]).items()} for text in texts()]
args = TrainingArguments(**{**SMALL, "per_device_train_batch_size": 1}, learning_rate=1e-4, save_strategy="no")
trainer = Trainer(model=model, args=args, train_dataset=rows)
trainer.train()
save(model, tokenizer)
