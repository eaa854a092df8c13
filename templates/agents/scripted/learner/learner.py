"""Groups of episodes to steps of the optimiser, on one or several processes.

Every episode weighs the same, however long it is and whichever process it lies on: two processes take the same step as one with
all of their episodes. Copied into `code/` of a workspace and used from there; nothing here is part of the suite itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import episodes
import numpy as np
import torch
import torch.distributed as dist
from batches import Pack, Spoken, Tokens, merged, packs
from objective import advantages, policy_loss, token_logps
from policy import Policy
from sharing import can_share, sharing

CLIP_NORM = 1.0
CHECKED_SEQUENCES, CHECKED_GAP = 24, 0.1
"""How far log-probabilities may lie apart, on average, for episodes to share what they begin with."""
MICRO_TOKENS_CPU = 8_192
MICRO_BYTES_A_TOKEN = 2.0e6
"""What a token costs in training a model of 135M without recomputation: activations of the layers, and the head's share."""
MICRO_SHARE = 0.35
"""Of a GPU's memory: beside it lie weights, optimiser, the sampler, and perhaps a grader's engine."""


class Learner:
    """Takes steps with a policy."""

    def __init__(self, policy: Policy, temperature: float) -> None:
        self.policy, self.temperature = policy, temperature
        self.accelerator = policy.accelerator
        self.micro_tokens = self._micro_tokens()
        self.plain = self.accelerator.unwrap_model(policy.model)
        self.shares = can_share(self.plain) and self.accelerator.state.deepspeed_plugin is None
        self._checked = False
        half = self.accelerator.mixed_precision == "bf16"
        self.dtype = torch.bfloat16 if half else next(self.plain.parameters()).dtype

    def learn(self, groups: Sequence[Sequence[Any]], rate: float) -> dict[str, float]:
        """One step on this process's groups of episodes, and what is worth logging, over all processes."""
        for group in self.policy.optimizer.param_groups:
            group["lr"] = rate
        sequences: list[Tokens] = []
        weighed = 0
        for group in filter(mixed, groups):  # the others have nothing to tell good from bad
            for episode, advantage in zip(
                group, advantages(torch.tensor([rewards_of(group)]))[0].tolist(), strict=True
            ):
                spoken = [Spoken(one.prompt, one.ids, one.logps) for one in episode.completions]
                made = merged(spoken, self.policy.limit)
                own = sum(int(one.own.sum()) for one in made)
                sequences += [one._replace(advantage=advantage / own) for one in made]
                weighed += 1
        told = {**self._step(self.batches(sequences), weighed), "sequences": sum(len(one.ids) for one in sequences)}
        played = [episode for group in groups for episode in group]
        rewards = [reward for group in groups for reward in rewards_of(group)]
        number, total, squares, of_mixed, of_steps, count, written = self.sums(
            len(rewards),
            sum(rewards),
            sum(reward**2 for reward in rewards),
            sum(map(mixed, groups)),
            sum(episode.steps for episode in played),
            len(groups),
            sum(episode.tokens for episode in played),
        )
        mean = total / max(1.0, number)
        return {
            **told,
            "learning_rate": rate,
            "reward": round(mean, 4),
            "reward_std": round(max(0.0, squares / max(1.0, number) - mean**2) ** 0.5, 4),
            "groups": int(count),
            "mixed_groups": round(of_mixed / max(1.0, count), 3),
            "steps_an_episode": round(of_steps / max(1.0, number), 2),
            "completions/mean_length": round(written / max(1.0, of_steps), 2),
        }

    def greedy(self, goals: Sequence[Any], pool: Any, recipe: Any) -> list[float]:
        """Rewards of one greedy episode of each goal, each process playing its share."""
        sampler, mine = (
            self.policy.sampler,
            range(self.accelerator.process_index, len(goals), self.accelerator.num_processes),
        )
        sampler.begin(0, 0.0)
        found = [0.0] * len(goals)
        groups = episodes.play(sampler, [goals[n] for n in mine], 1, pool, recipe) if mine else []
        for n, (episode,) in zip(mine, groups, strict=True):
            found[n] = episode.reward or 0.0
        return self.sums(*found)

    def sums(self, *values: float) -> list[float]:
        """Each value summed over all processes."""
        total = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        if self.accelerator.num_processes > 1:  # vLLM begins a group of this process alone
            dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def batches(self, sequences: Sequence[Tokens]) -> list[Pack]:
        """Micro-batches, as many on each process: models on several GPUs are called in step. What is filled up weighs nothing."""
        pad = self.policy.words.pad
        if self.shares and not self._checked and sequences:
            self._checked = True
            self.shares = self._as_without(sequences[:CHECKED_SEQUENCES])
        made = packs(sequences, self.micro_tokens, pad, shared=self.shares)
        most = torch.tensor(float(len(made)), device=self.accelerator.device)
        if self.accelerator.num_processes > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        nothing = Tokens(np.full(2, pad, np.int32), np.array([False, True]), np.zeros(2, np.float32))
        return made + packs([nothing], 2, pad) * (int(most.item()) - len(made))

    def _step(self, batches: Sequence[Pack], weighed: int) -> dict[str, float]:
        """A step on micro-batches of so many of this process's episodes."""
        if not batches:
            return {"loss": 0.0, "grad_norm": 0.0, "num_tokens": 0.0}
        episodes, tokens = self.sums(weighed, sum(batch.learned for batch in batches))
        self.policy.model.train()
        loss: Any = 0.0
        gap: Any = 0.0
        for place, batch in enumerate(batches):
            more = self._backward(batch, max(1.0, episodes), last=place == len(batches) - 1)
            loss, gap = loss + more[0], gap + more[1]
        norm = self.apply(CLIP_NORM)
        self.policy.model.eval()
        loss, gap = self.sums(float(loss), float(gap))
        return {
            "loss": round(loss, 6),
            "grad_norm": round(norm, 4),
            "sampler_gap": round(gap / max(1.0, tokens), 5),
            "num_tokens": tokens,
            "launches": len(batches),
        }

    def imitate(self, mine: Sequence[Tokens], rate: float) -> dict[str, float]:
        """One step on this process's sequences as they stand; loss is the mean over all tokens that are to be learned."""
        for group in self.policy.optimizer.param_groups:
            group["lr"] = rate
        batches = self.batches(mine)
        here = sum(batch.learned for batch in batches)
        (total,) = self.sums(here)
        self.policy.model.train()
        losses: Any = 0.0
        for place, batch in enumerate(batches):
            losses = losses + self.imitated(batch, max(1.0, total), last=place == len(batches) - 1)
        norm = self.apply(CLIP_NORM)
        made = sum(len(batch.ids) for batch in batches)
        loss, tokens, computed = self.sums(float(losses), sum(len(one.ids) for one in mine), made)
        told = {"loss": round(loss, 5), "grad_norm": round(norm, 4), "learning_rate": rate}
        return {**told, "tokens": tokens, "computed": computed}

    def imitated(self, batch: Pack, total: float, *, last: bool) -> torch.Tensor:
        """Adds the gradient of a micro-batch's mean loss on tokens that are to be learned as they stand; `total` of them in the step."""
        self.accelerator.gradient_state._set_sync_gradients(last)
        with nullcontext() if last else self.accelerator.no_sync(self.policy.model):
            new, _, weight = self.logps(batch)
            loss = -(new * weight).sum() / total
            self.accelerator.backward(loss * self.accelerator.num_processes)
        return loss.detach()  # no number yet: the GPU is not waited for

    def apply(self, clip: float) -> float:
        """Takes the optimiser's step; the gradient's norm before it was clipped."""
        norm = self.accelerator.clip_grad_norm_(self.policy.model.parameters(), clip)
        if self.accelerator.state.deepspeed_plugin is not None:
            norm = self.policy.model.get_global_grad_norm()  # its own step was taken in backward
        self.policy.optimizer.step()
        self.policy.optimizer.zero_grad()
        return float(norm or 0.0)

    def _backward(self, batch: Pack, episodes: float, *, last: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds one micro-batch's gradient; the processes' gradients are joined at the last one."""
        self.accelerator.gradient_state._set_sync_gradients(last)  # DeepSpeed takes its step there
        with nullcontext() if last else self.accelerator.no_sync(self.policy.model):
            new, sampled, weight = self.logps(batch)
            loss = policy_loss(new, sampled, weight, episodes)
            # The processes' gradients are averaged, and here they must add up.
            self.accelerator.backward(loss * self.accelerator.num_processes)
        gap = ((new.detach() - sampled).abs() * (weight != 0)).sum()
        return loss.detach(), gap

    def _as_without(self, sequences: Sequence[Tokens]) -> bool:
        """Whether sequences behind a shared beginning have the log-probabilities that they have by themselves, on this machine."""
        self.plain.eval()
        found = []
        try:
            with torch.no_grad():
                for self.shares in (True, False):
                    parts = packs(sequences, self.micro_tokens, self.policy.words.pad, shared=self.shares)
                    found.append(torch.cat([self.logps(part, self.plain)[0] for part in parts]).sort().values)
            gap = float((found[0] - found[1]).abs().mean())
        except Exception as error:
            print(f"each episode is computed by itself: {type(error).__name__}: {error}"[:500], flush=True)
            return False
        print(f"episodes behind one copy of what they share: gap to each by itself {gap:.5f}", flush=True)
        return gap < CHECKED_GAP

    def logps(self, batch: Pack, model: Any = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the policy's tokens in a micro-batch: log-probabilities now, the sampler's, and advantages; [n] each."""
        model = self.policy.model if model is None else model
        fields = ("ids", "own", "logps", "advantages", "places")
        ids, own, logps, advantages, places = (
            torch.from_numpy(getattr(batch, name))[None].to(self.accelerator.device) for name in fields
        )
        with self.accelerator.autocast():
            if self.shares:
                with sharing(self.plain, batch.groups, self.dtype) as extra:
                    new = token_logps(model, ids, own, self.temperature, position_ids=places, **extra)
            else:
                rows = batch.groups[0].number
                new = token_logps(model, ids.view(rows, -1), own.view(rows, -1), self.temperature)
        return new, logps[own], advantages[own]

    def _micro_tokens(self) -> int:
        if self.accelerator.device.type != "cuda":
            return MICRO_TOKENS_CPU
        total = torch.cuda.get_device_properties(self.accelerator.device).total_memory
        return max(self.policy.limit, int(MICRO_SHARE * total / MICRO_BYTES_A_TOKEN))


def rewards_of(group: Sequence[Any]) -> list[float]:
    """A group's rewards; an episode without one has the others' mean."""
    known = [float(episode.reward) for episode in group if episode.reward is not None] or [0.0]
    return [float(np.mean(known)) if episode.reward is None else float(episode.reward) for episode in group]


def mixed(group: Sequence[Any]) -> bool:
    """Whether a group's rewards differ: else it teaches nothing."""
    found = rewards_of(group)
    return max(found) > min(found)
