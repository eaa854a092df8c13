import torch
from tiny import *

model, tokenizer = load()
value_head = torch.nn.Linear(64, 1)
optimizer = torch.optim.AdamW([*model.parameters(), *value_head.parameters()], lr=1e-5)
for step in range(4):
    rows = ROWS[4 * step : 4 * step + 4]
    ids, answers = sample(model, tokenizer, [row["prompt"] for row in rows])
    returns = torch.tensor([reward(a, row["completion"]) for a, row in zip(answers, rows)])
    hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][:, -1]
    old = logps(model, ids).detach()
    advantages = (returns - value_head(hidden).squeeze(-1)).detach()
    for _ in range(2):
        ratio = torch.exp(logps(model, ids) - old)
        policy_loss = -torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages).mean()
        value_loss = torch.nn.functional.mse_loss(value_head(hidden.detach()).squeeze(-1), returns)
        (policy_loss + 0.5 * value_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    print(
        f"step={step} policy_loss={policy_loss.item():.4f} value_loss={value_loss.item():.4f} reward={returns.mean():.3f}"
    )
save(model, tokenizer)
