from tiny import *

model, tokenizer = load()
_, answers = sample(model, tokenizer, [row["prompt"] for row in ROWS])
print(sum(reward(a, row["completion"]) for a, row in zip(answers, ROWS)) / len(ROWS))
