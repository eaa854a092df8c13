"""Multi-turn GRPO on the text game: roll out groups of episodes, then one policy update."""
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from game import make_env


def play(model, tok, env, seed, max_turns=12):
    obs = env.reset(seed=seed)
    segments, done, total = [], False, 0.0
    for _ in range(max_turns):
        ids = tok(obs, return_tensors="pt").input_ids.to(model.device)
        out = model.generate(ids, do_sample=True, max_new_tokens=16, temperature=1.0, pad_token_id=tok.pad_token_id)
        action = tok.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        segments.append((out[0], ids.shape[1]))
        obs, r, done = env.step(action)
        total += r
        if done:
            break
    return segments, total


def nll(model, seq, start):
    logits = model(seq[None]).logits[0, start - 1 : -1]
    return torch.nn.functional.cross_entropy(logits, seq[start:])


def main():
    tok = AutoTokenizer.from_pretrained("models/base")
    model = AutoModelForCausalLM.from_pretrained("models/base").to("cuda")
    optim = torch.optim.AdamW(model.parameters(), lr=2e-6)
    env = make_env("data/train_games")
    for it in range(200):
        episodes = [play(model, tok, env, seed=it) for _ in range(8)]
        R = np.array([t for _, t in episodes])
        if R.std() < 1e-6:
            continue
        A = (R - R.mean()) / (R.std() + 1e-8)
        optim.zero_grad()
        for (segments, _), a in zip(episodes, A):
            for seq, start in segments:
                loss = float(a) * nll(model, seq, start) / len(segments) / len(episodes)
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        print(f"iter {it} return {R.mean():.3f}", flush=True)
    model.save_pretrained("output/game")
    tok.save_pretrained("output/game")


main()
