import json
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo import Critic, Losses


class Learner:
    def __init__(self, path):
        self.tok = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.lm = AutoModelForCausalLM.from_pretrained(path).cuda()
        self.critic = Critic(self.lm.config.hidden_size).cuda()
        self.losses = Losses(0.2, 0.5, 0.01)
        self.optim = torch.optim.AdamW([*self.lm.parameters(), *self.critic.parameters()], lr=3e-6)

    def forward(self, seq):
        out = self.lm(seq, output_hidden_states=True)
        dist = torch.distributions.Categorical(logits=out.logits[:, :-1])
        return dist.log_prob(seq[:, 1:]), self.critic(out.hidden_states[-1][:, :-1]), dist.entropy()

    def play(self, rows):
        enc = self.tok([r["prompt"] for r in rows], return_tensors="pt", padding=True).to("cuda")
        with torch.no_grad():
            seq = self.lm.generate(**enc, do_sample=True, max_new_tokens=80)
            lp, v, _ = self.forward(seq)
        mask = torch.zeros_like(lp)
        mask[:, enc.input_ids.shape[1] - 1 :] = 1
        score = torch.tensor([float(r["answer"] in t) for r, t in zip(rows, self.tok.batch_decode(seq))]).cuda()
        ret = score[:, None] * mask
        return seq, lp, v, ret - v, ret, mask

    def learn(self, batch, epochs=2):
        seq, lp, v, adv, ret, mask = batch
        for _ in range(epochs):
            new, nv, ent = self.forward(seq)
            loss = self.losses.total(new, lp, adv, nv, v, ret, ent, mask)
            self.optim.zero_grad()
            loss.backward()
            self.optim.step()


if __name__ == "__main__":
    learner = Learner("models/base")
    rows = [json.loads(l) for l in open("data/train.jsonl")]
    for _ in range(150):
        learner.learn(learner.play(random.sample(rows, 16)))
    learner.lm.save_pretrained("output/agent")
    learner.tok.save_pretrained("output/agent")
