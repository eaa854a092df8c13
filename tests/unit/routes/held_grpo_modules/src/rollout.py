import asyncio

import torch


class Sampler:
    def __init__(self, engine, tok, n):
        self.engine, self.tok, self.n = engine, tok, n

    def __call__(self, prompts):
        from vllm import SamplingParams

        outs = self.engine.generate(prompts, SamplingParams(n=self.n, temperature=1.0, max_tokens=300, logprobs=0))
        return [[(o.token_ids, o.text) for o in out.outputs] for out in outs]
