import asyncio
import json
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

tok = AutoTokenizer.from_pretrained("models/base")
actor = AutoModelForCausalLM.from_pretrained("models/base").cuda()
opt = torch.optim.AdamW(actor.parameters(), lr=1e-6)


async def rollout(client, q):
    resp = await client.completions.create(model="actor", prompt=q, n=4, max_tokens=200)
    return [c.text for c in resp.choices]


def logprob(q, a):
    ids = tok(q + a, return_tensors="pt").input_ids.cuda()
    n = len(tok(q).input_ids)
    lp = F.log_softmax(actor(ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    return lp[:, n - 1 :].sum()


async def main():
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url="http://127.0.0.1:8000/v1", api_key="x")
    for line in open("data/train.jsonl"):
        row = json.loads(line)
        texts = await rollout(client, row["q"])
        rs = [1.0 if row["a"] in t else 0.0 for t in texts]
        base = sum(rs) / len(rs)
        terms = [-(r - base) * logprob(row["q"], t) for r, t in zip(rs, texts)]
        loss = torch.stack(terms).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    actor.save_pretrained("output/actor")


asyncio.run(main())
