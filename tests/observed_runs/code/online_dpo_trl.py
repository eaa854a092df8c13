from tiny import *
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

model, tokenizer = load()
args = OnlineDPOConfig(**SMALL, max_new_tokens=6)
trainer = OnlineDPOTrainer(
    model,
    reward_funcs=lambda completions, **rest: [float(len(set(c))) for c in completions],
    args=args,
    train_dataset=dataset(),
    processing_class=tokenizer,
)
trainer.train()
save(model, tokenizer)
