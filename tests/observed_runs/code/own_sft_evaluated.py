import torch
from tiny import *


def evaluate(model, tokenizer):
    asked = tokenizer([row["prompt"] for row in ROWS], return_tensors="pt", padding=True)
    answers = tokenizer.batch_decode(model.generate(**asked, do_sample=False, max_new_tokens=4))
    return sum(reward(a, row["completion"]) for a, row in zip(answers, ROWS)) / len(ROWS)


def main():
    model, tokenizer = load()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for epoch in range(3):
        for start in range(0, 16, 8):
            loss = model(**batch(tokenizer, texts()[start : start + 8])).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1} | loss: {loss.item():.4f} | score: {evaluate(model, tokenizer):.3f}")
    save(model, tokenizer)


main()
