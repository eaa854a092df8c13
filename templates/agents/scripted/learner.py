"""Groups of episodes to steps of the optimiser, on one or several processes.

Every token of the policy weighs the same, whichever process it lies on: two processes take the same step as one with all
of their episodes. Copied into `code/` of a workspace and used from there; nothing here is part of the suite itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from batches import Spoken, Tokens, merged, micro_batches, padded
from objective import advantages, policy_loss, token_logps
from policy import Policy

CLIP_NORM = 1.0
MICRO_TOKENS_CPU = 8_192
MICRO_BYTES_A_TOKEN = 2.0e6
"""What a token costs in training a model of 135M without recomputation: activations of the layers, and the head's share."""
MICRO_SHARE = 0.25
"""Of a GPU's memory: beside it lie weights, optimiser, the sampler, and perhaps a grader's engine."""


class Learner:
    """Takes steps with a policy."""

    def __init__(self, policy: Policy, temperature: float) -> None:
        self.policy, self.temperature = policy, temperature
        self.accelerator = policy.accelerator
        self.micro_tokens = self._micro_tokens()

    def learn(self, groups: Mapping[int, Sequence[Any]], part_of: Callable[[int], int], parts: int) -> dict[str, float]:
        """Some steps on groups of episodes, one a part, and what is worth logging, over all processes.

        Args:
            groups: this process's episodes by the number of their goal.
            part_of: which step a goal's episodes belong to.
        """
        sequences: list[list[Tokens]] = [[] for _ in range(parts)]
        rewards, mixed, steps = [], 0, 0
        for number, group in groups.items():
            found = [episode.reward for episode in group]
            known = [reward for reward in found if reward is not None] or [0.0]
            values = torch.tensor([[float(np.mean(known)) if reward is None else reward for reward in found]])
            rewards += values[0].tolist()
            steps += sum(episode.steps for episode in group)
            if float(values.max() - values.min()) == 0.0:
                continue  # nothing to tell good from bad
            mixed += 1
            for episode, advantage in zip(group, advantages(values)[0].tolist(), strict=True):
                spoken = [Spoken(one.prompt, one.ids, one.logps) for one in episode.completions]
                sequences[part_of(number)] += merged(spoken, self.policy.limit, advantage)
        told = self._steps([self.batches(part) for part in sequences])
        written = sum(episode.tokens for group in groups.values() for episode in group)
        number, total, squares, of_mixed, of_steps, count, written = self.sums(
            len(rewards), sum(rewards), sum(reward**2 for reward in rewards), mixed, steps, len(groups), written
        )
        mean = total / max(1.0, number)
        return {
            **told,
            "learning_rate": self.policy.rate,
            "reward": round(mean, 4),
            "reward_std": round(max(0.0, squares / max(1.0, number) - mean**2) ** 0.5, 4),
            "mixed_groups": round(of_mixed / max(1.0, count), 3),
            "steps_an_episode": round(of_steps / max(1.0, number), 2),
            "completions/mean_length": round(written / max(1.0, of_steps), 2),
        }

    def sums(self, *values: float) -> list[float]:
        """Each value summed over all processes."""
        total = torch.tensor(values, dtype=torch.float64, device=self.accelerator.device)
        if self.accelerator.num_processes > 1:  # vLLM begins a group of this process alone
            dist.all_reduce(total)
        return [float(value) for value in total.tolist()]

    def batches(self, sequences: Sequence[Tokens]) -> list[list[Tokens]]:
        """Micro-batches, as many on each process: models on several GPUs are called in step. What is filled up weighs nothing."""
        made = micro_batches(sequences, self.micro_tokens)
        most = torch.tensor(float(len(made)), device=self.accelerator.device)
        if self.accelerator.num_processes > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        nothing = Tokens(np.full(2, self.policy.words.pad, np.int32), np.array([False, True]), np.zeros(2, np.float32))
        return made + [[nothing]] * (int(most.item()) - len(made))

    def _steps(self, parts: Sequence[Sequence[list[Tokens]]]) -> dict[str, float]:
        olds = self._before(parts) if sum(map(bool, parts)) > 1 else None
        losses, cuts, tokens, norms, gaps = 0.0, 0.0, 0.0, [], 0.0
        for number, batches in enumerate(parts):
            if not batches:
                continue
            here = sum(int(one.own[1:].sum()) for batch in batches for one in batch if one.advantage)
            (total,) = self.sums(here)
            self.policy.model.train()
            for place, batch in enumerate(batches):
                old = None if olds is None else olds[number][place]
                loss, cut, gap = self._backward(batch, old, max(1.0, total), last=place == len(batches) - 1)
                losses, cuts, gaps = losses + loss, cuts + cut, gaps + gap
            norms.append(self.apply(CLIP_NORM))
            tokens += total
        self.policy.model.eval()
        loss, cut, gap = self.sums(losses, cuts, gaps)
        return {
            "loss": round(loss / max(1, len(norms)), 6),
            "grad_norm": round(float(np.mean(norms)), 4) if norms else 0.0,
            "clip_ratio": round(cut / max(1.0, tokens), 4),
            "sampler_gap": round(gap / max(1.0, tokens), 5),
            "num_tokens": tokens,
        }

    def imitated(self, batch: list[Tokens], total: float, *, last: bool) -> float:
        """Adds the gradient of a micro-batch's mean loss on tokens that are to be learned as they stand; `total` of them in the step."""
        self.accelerator.gradient_state._set_sync_gradients(last)
        with nullcontext() if last else self.accelerator.no_sync(self.policy.model):
            new, _, weight = self.logps(batch)
            loss = -(new * weight).sum() / total
            self.accelerator.backward(loss * self.accelerator.num_processes)
        return float(loss.detach())

    def apply(self, clip: float) -> float:
        """Takes the optimiser's step; the gradient's norm before it was clipped."""
        norm = self.accelerator.clip_grad_norm_(self.policy.model.parameters(), clip)
        if self.accelerator.state.deepspeed_plugin is not None:
            norm = self.policy.model.get_global_grad_norm()  # its own step was taken in backward
        self.policy.optimizer.step()
        self.policy.optimizer.zero_grad()
        return float(norm or 0.0)

    def _before(self, parts: Sequence[Sequence[list[Tokens]]]) -> list[list[torch.Tensor]]:
        """The trained model's log-probabilities before the first of several steps."""
        self.policy.model.eval()
        with torch.no_grad():
            return [[self.logps(batch)[0] for batch in batches] for batches in parts]

    def _backward(self, batch: list[Tokens], old: Any, total: float, *, last: bool) -> tuple[float, float, float]:
        """Adds one micro-batch's gradient; the processes' gradients are joined at the last one."""
        self.accelerator.gradient_state._set_sync_gradients(last)  # DeepSpeed takes its step there
        with nullcontext() if last else self.accelerator.no_sync(self.policy.model):
            new, sampled, advantage = self.logps(batch)
            before = new.detach() if old is None else old
            loss, cut = policy_loss(new, before, sampled, advantage, total)
            # The processes' gradients are averaged, and here they must add up.
            self.accelerator.backward(loss * self.accelerator.num_processes)
        counted = advantage != 0
        gap = ((before - sampled).abs() * counted).sum()
        return float(loss.detach()), float(cut), float(gap.detach())

    def logps(self, batch: list[Tokens]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the policy's tokens in a micro-batch: log-probabilities now, the sampler's, and advantages; [n] each."""
        arrays = {
            name: torch.from_numpy(value).to(self.accelerator.device)
            for name, value in padded(batch, self.policy.words.pad).items()
        }
        own = arrays["own"]
        with self.accelerator.autocast():
            new = token_logps(self.policy.model, arrays["ids"], own, self.temperature)
        places = own[:, 1:]
        return new, arrays["logps"][:, 1:][places], arrays["advantages"][:, None].expand_as(places)[places]

    def _micro_tokens(self) -> int:
        if self.accelerator.device.type != "cuda":
            return MICRO_TOKENS_CPU
        total = torch.cuda.get_device_properties(self.accelerator.device).total_memory
        return max(self.policy.limit, int(MICRO_SHARE * total / MICRO_BYTES_A_TOKEN))
