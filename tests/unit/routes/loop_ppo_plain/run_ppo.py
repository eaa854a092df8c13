import json
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_core import ActorCritic, gae, ppo_loss


def check(text, gold):
    return float(gold in text)


def logprobs(logits, ids):
    return torch.log_softmax(logits[:, :-1], -1).gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)


def main():
    tok = AutoTokenizer.from_pretrained("models/base")
    net = ActorCritic(AutoModelForCausalLM.from_pretrained("models/base")).cuda()
    opt = torch.optim.Adam(net.parameters(), lr=5e-6)
    rows = [json.loads(x) for x in open("data/train.jsonl")]
    for it in range(200):
        row = random.choice(rows)
        ids = tok([row["question"]] * 16, return_tensors="pt").input_ids.cuda()
        with torch.no_grad():
            seq = net.lm.generate(ids, do_sample=True, max_new_tokens=128)
            logits, values = net(seq)
            old = logprobs(logits, seq)
        rewards = torch.zeros_like(old)
        rewards[:, -1] = torch.tensor([check(t, row["gold"]) for t in tok.batch_decode(seq)], device="cuda")
        adv, ret = gae(rewards, values[:, :-1])
        for _ in range(4):
            logits, values = net(seq)
            loss = ppo_loss(logprobs(logits, seq), old, adv, values[:, :-1], ret)
            opt.zero_grad()
            loss.backward()
            opt.step()
    net.lm.save_pretrained("output/ppo")


if __name__ == "__main__":
    main()
