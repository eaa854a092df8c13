import torch
from tiny import *
from torch.nn import functional

student, tokenizer = load()
teacher, _ = load("models/teacher")
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4)
for step in range(5):
    inputs = batch(tokenizer, texts())
    with torch.no_grad():
        teacher_logits = teacher(**inputs).logits
    loss = functional.kl_div(
        student(**inputs).logits.log_softmax(-1), teacher_logits.softmax(-1), reduction="batchmean"
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
save(student, tokenizer)
