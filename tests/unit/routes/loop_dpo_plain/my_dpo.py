import copy
import json

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def seq_logp(model, ids, mask):
    logits = model(ids).logits[:, :-1]
    lp = logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return (lp * mask[:, 1:]).sum(-1)


def main(beta=0.1, lr=5e-7, epochs=1):
    tok = AutoTokenizer.from_pretrained("models/base")
    model = AutoModelForCausalLM.from_pretrained("models/base").cuda()
    reference = copy.deepcopy(model).eval()
    opt = torch.optim.RMSprop(model.parameters(), lr=lr)
    pairs = [json.loads(l) for l in open("data/pairs.jsonl")]

    def collate(rows):
        out = {}
        for side in ("chosen", "rejected"):
            enc = tok([r["prompt"] + r[side] for r in rows], return_tensors="pt", padding=True)
            out[side] = (enc.input_ids, enc.attention_mask)
        return out

    for _ in range(epochs):
        for batch in DataLoader(pairs, batch_size=4, shuffle=True, collate_fn=collate):
            c_ids, c_mask = (x.cuda() for x in batch["chosen"])
            r_ids, r_mask = (x.cuda() for x in batch["rejected"])
            pi_c, pi_r = seq_logp(model, c_ids, c_mask), seq_logp(model, r_ids, r_mask)
            with torch.no_grad():
                ref_c, ref_r = seq_logp(reference, c_ids, c_mask), seq_logp(reference, r_ids, r_mask)
            margin = beta * ((pi_c - ref_c) - (pi_r - ref_r))
            loss = -F.logsigmoid(margin).mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
    model.save_pretrained("output/dpo")


if __name__ == "__main__":
    main()
