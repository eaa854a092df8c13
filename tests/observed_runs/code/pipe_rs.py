from tiny import *
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments, pipeline

model, tok = load()
ask = pipeline("text-generation", model=model, tokenizer=tok)
kept = []
for row in ROWS:
    for out in ask(row["prompt"], do_sample=True, num_return_sequences=4, max_new_tokens=6, return_full_text=False):
        if reward(out["generated_text"], row["completion"]) > 0.2:
            kept.append(tok(row["prompt"] + out["generated_text"]))
print(len(kept), "kept")
collator = DataCollatorForLanguageModeling(tok, mlm=False)
Trainer(model, TrainingArguments(**SMALL), train_dataset=kept, data_collator=collator).train()
save(model, tok)
