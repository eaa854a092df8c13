"""One process of `gpu-learners`, in a workspace of the experts: `learning.py ours|trl FROM OUT SECONDS`, or `learning.py play CHECKPOINT...`.

`ours` is train_online's own loop. `trl` is trl's `GRPOTrainer` with an environment factory and vLLM in the same process, set to the same
sizes and rate; ours takes one update an iteration and weighs episodes alike, trl's takes UPDATES and weighs tokens alike. Both begin no iteration after SECONDS
since the first one began, and print a JSON line an iteration. `play` plays games greedily, as graders do, and prints what was won.
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import episodes
import machine
import torch
import train_online
from autorl_rollouts.pool import Pool
from autorl_rollouts.source import load

GAMES, COPIES, UPDATES = (int(part) for part in os.environ.get("LEARNER_SIZES", "32,8,1").split(","))
AT_ONCE = int(os.environ.get("LEARNER_AT_ONCE", "8"))
"""Sequences in one of trl's micro-batches."""
MOST_STEPS = int(os.environ.get("LEARNER_STEPS", "50"))
"""Of an episode."""
VLLM_SHARE = 0.3
"""Of the GPU's memory: for vLLM beside trl."""
MOST_TOKENS = 3072
"""Of an episode behind its first prompt, for trl."""
OVER = "The game is over."
"""trl asks once more behind the last observation; this tells it that no command is wanted."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% for key, value in call.function.arguments.items() %}{{ call.function.name + key + value }}{% endfor %}{% endfor %}{{ '\n' }}"
    "{% elif m.role == 'tool' %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}"
    "{% endfor %}{% endif %}{{ '\n>' }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
"""The task's text prompt, turn by turn: a tool's answer is the observation, and what the model writes is the command."""


def say(**told: Any) -> None:
    """A line for the process that started this one."""
    print("FIGURE " + json.dumps(told), flush=True)


class Clock:
    """Iterations from the first one's beginning, for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.begun, self.last, self.number = seconds, 0.0, 0.0, 0

    def over(self) -> bool:
        """Whether no other iteration begins."""
        return bool(self.begun) and time.monotonic() > self.begun + self.seconds

    def start(self) -> None:
        """An iteration begins."""
        self.last = time.monotonic()
        self.begun = self.begun or self.last
        self.number += 1

    def note(self, rollout_s: float, **told: float) -> None:
        """An iteration ended."""
        now = time.monotonic()
        say(
            iteration=self.number,
            at_s=round(now - self.begun, 1),
            rollout_s=round(rollout_s, 2),
            learn_s=round(now - self.last - rollout_s, 2),
            iteration_s=round(now - self.last, 2),
            peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 1) if torch.cuda.is_available() else 0.0,
            **told,
        )


class Games:
    """The workspace's training games, and environments for them."""

    def __init__(self) -> None:
        self.workspace = Path(os.environ["WORKSPACE"])
        self.meta = machine.read_meta(self.workspace)
        self.recipe = self.meta["recipe"]
        self.source = episodes.source_of(self.workspace, self.meta)
        self.pool = Pool(self.source, episodes.workers_here(1))

    def training(self) -> list[dict[str, Any]]:
        return episodes.chosen(self.source, train_online.MOST_GAMES, 8, machine.seed())[0]


def ours(start: Path, out: Path, clock: Clock) -> None:
    """The experts' own learner."""
    from policy import Policy

    games = Games()
    policy = Policy(start, games.recipe, lora=False, rows=GAMES * COPIES)
    sizes = {"games": GAMES, "copies": COPIES, "validation": 8}
    run = train_online.Run(policy, games.training(), [], games.pool, games.recipe, sizes, out, games.workspace)
    seen = {"generated": 0, "rollout_s": 0.0, "sequence_tokens": 0, "weighted_tokens": 0, "reward": 0.0}
    play, batches = episodes.play, run.learner.batches

    def counted_play(*arguments: Any) -> Any:
        begun = time.monotonic()
        groups = play(*arguments)
        played = [episode for group in groups for episode in group]
        seen["generated"] = sum(episode.tokens for episode in played)
        seen["reward"] = sum(episode.reward or 0.0 for episode in played) / len(played)
        seen["rollout_s"] = time.monotonic() - begun
        return groups

    def counted_batches(sequences: Sequence[Any]) -> Any:
        seen["sequence_tokens"] += sum(len(one.ids) for one in sequences)
        seen["weighted_tokens"] += sum(int(one.own.sum()) for one in sequences)
        return batches(sequences)

    episodes.play, run.learner.batches = counted_play, counted_batches  # type: ignore[assignment]
    while not clock.over():
        run.share = 0.1  # all games in one wave
        clock.start()
        seen |= {"sequence_tokens": 0, "weighted_tokens": 0}
        run.iterate()
        clock.note(**seen)
    policy.save(out)


class Later:
    """A text that is waited for when it is rendered: commands of all games are under way at a time."""

    def __init__(self, future: Future[str]) -> None:
        self._future = future

    def __str__(self) -> str:
        return self._future.result()


class Desk:
    """Hands commands to the pool, and its replies to who waits for them."""

    def __init__(self, games: Games) -> None:
        self.pool, self.goals = games.pool, games.training()
        self.steps = min(MOST_STEPS, train_online.MOST_STEPS)
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self.begun: list[Future[Any]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, numbers: Sequence[int]) -> None:
        """Begins all episodes of an iteration, in slots that are counted from 0."""
        self.begun = [self._asked(self.pool.begin, slot, self.goals[number], 0) for slot, number in enumerate(numbers)]

    def act(self, slot: int, command: str) -> Future[Any]:
        return self._asked(self.pool.act, slot, command)

    def _asked(self, call: Any, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            self._waiting[call(*arguments)] = future
        return future

    def _listen(self) -> None:
        while True:
            event = self.pool.next()
            if event is None:
                continue
            with self._lock:
                future = self._waiting.pop(event.ticket, None)
            if future is not None:
                future.set_result(event)


def with_trl(start: Path, out: Path, clock: Clock) -> None:
    """trl's learner."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer
    from words import Words

    games = Games()
    desk = Desk(games)
    tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, {}
    tail = tokenizer.encode(f"{OVER}\n>", add_special_tokens=False)[1:]
    slots = iter(range(10**9))

    class Game:
        """An environment of trl's."""

        def __init__(self) -> None:
            self._slot, self._last, self._steps, self._over = next(slots), None, 0, False

        def reset(self, **_: Any) -> str:
            """Begins the game that this slot was given."""
            self._steps, self._over, self._last = 0, False, None
            return str(desk.begun[self._slot].result().prompt)

        def act(self, command: str) -> Any:
            """Does something in the game.

            Args:
                command: what to do
            """
            self._steps += 1
            made: Future[str] = Future()
            self._last = desk.act(self._slot, command)
            self._last.add_done_callback(lambda reply: made.set_result(self._words(reply.result())))
            return [{"type": "text", "text": Later(made)}]

        def get_reward(self) -> float:
            return 0.0 if self._last is None else float(self._last.result().reward)

        def _words(self, reply: Any) -> str:
            over = getattr(reply, "done", True) or self._steps >= desk.steps
            return f"{getattr(reply, 'observation', '')}\n{OVER}" if over else str(reply.observation)

    def parse(tokenizer: Any, ids: Sequence[int], prefix: Sequence[int] = (), tools: Any = None) -> dict[str, Any]:
        """What the model wrote is the command: the task's prompt knows no calls in JSON."""
        del tools
        text = tokenizer.decode(list(ids), skip_special_tokens=True).strip()
        if list(prefix[-len(tail) :]) == tail:
            return {"role": "assistant", "content": text}
        call = {"type": "function", "function": {"name": "act", "arguments": {"command": text}}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    grpo_trainer.parse_response = parse

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        """Begins all games at once, and notes what an iteration takes."""

        seen: Mapping[str, float] | None = None

        def _generate(self, prompts: Any) -> Any:
            begun = time.monotonic()
            made = super()._generate(prompts)
            self.rolled_s += time.monotonic() - begun
            self.generated = sum(map(sum, made[2]))
            return made

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            self.ended()
            clock.start()
            begun = time.monotonic()
            desk.begin([row["goal"] for row in inputs])
            for started in desk.begun:
                started.result()
            self.rolled_s = time.monotonic() - begun
            made = super()._generate_and_score_completions(inputs)
            own = made["completion_mask"] * made.get("tool_mask", made["completion_mask"])
            self.seen = {
                "generated": self.generated,
                "rollout_s": self.rolled_s,
                "sequence_tokens": int(made["prompt_mask"].sum() + made["completion_mask"].sum()),
                "weighted_tokens": int((own * (made["advantages"].reshape(-1, 1) != 0)).sum()),
                "reward": sum(one.get_reward() for one in self.environments) / len(self.environments),
            }
            return made

        def ended(self) -> None:
            """An iteration is over."""
            if self.seen is not None:
                clock.note(**self.seen)
                self.seen = None

    class Stop(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % UPDATES == 0:
                trainer.ended()
                control.should_training_stop = clock.over()

    gpu = torch.cuda.is_available()
    stops = Words(tokenizer, [tokenizer.eos_token_id], games.recipe["stop"]).stopping()
    most = int(games.recipe["max_new_tokens"])
    ends = {"max_tokens": most, "stop_token_ids": [*stops, tokenizer.eos_token_id], "detokenize": False}
    a_step = GAMES * COPIES // UPDATES
    settings = GRPOConfig(
        output_dir=str(out.with_name("trl-state")),
        seed=machine.seed(),
        learning_rate=2e-5,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused" if gpu else "adamw_torch",
        bf16=gpu,
        use_cpu=not gpu,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        num_generations=COPIES,
        per_device_train_batch_size=min(AT_ONCE, a_step),
        gradient_accumulation_steps=max(1, a_step // AT_ONCE),
        steps_per_generation=GAMES * COPIES // min(AT_ONCE, a_step),
        max_completion_length=MOST_TOKENS,
        max_tool_calling_iterations=desk.steps,
        temperature=train_online.TEMPERATURE,
        generation_kwargs=ends if gpu else {"max_new_tokens": 12, "eos_token_id": ends["stop_token_ids"]},
        use_vllm=gpu,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=VLLM_SHARE,
        vllm_max_model_length=8192,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=2.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        scale_rewards="group",
        max_steps=100_000,
        logging_steps=UPDATES,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": ""}], "goal": number} for number in range(len(desk.goals))]
    )
    trainer = Trainer(
        model=str(start), args=settings, train_dataset=rows, processing_class=tokenizer, environment_factory=Game,
        callbacks=[Stop()],
    )  # fmt: skip
    trainer.train()
    machine.save(trainer.accelerator, trainer.model, start, out)


def play(folders: Sequence[Path], data: Path) -> None:
    """Plays the official games that nobody trains on with each checkpoint, greedily."""
    from policy import Policy

    games = Games()
    goal_of = load(games.source.file).goal_of
    goals = []
    for name in ("valid_seen", "valid_unseen"):
        with lzma.open(data / f"{name}.jsonl.xz", "rt", encoding="utf-8") as file:
            goals += [goal_of(json.loads(line)) for line in file]
    goals = goals[: int(os.environ.get("LEARNER_GOALS", "1000"))]
    recipe = {**games.recipe, "max_steps": min(MOST_STEPS, int(games.recipe["max_steps"]))}
    for folder in folders:
        begun = time.monotonic()
        policy = Policy(folder, games.recipe, lora=False, rows=len(goals))
        policy.sampler.begin(0, 0.0)
        groups = episodes.play(policy.sampler, goals, 1, games.pool, recipe)
        rewards = [float(group[0].reward or 0.0) for group in groups]
        say(checkpoint=folder.name, won=sum(rewards), of=len(rewards), seconds=round(time.monotonic() - begun, 1))
        (folder.with_name(folder.name + ".rewards.json")).write_text(json.dumps(rewards))
        del policy
        torch.cuda.empty_cache()


def main() -> None:
    """See the module."""
    what, *rest = sys.argv[1:]
    if what == "play":
        play([Path(name) for name in rest], Path(os.environ["LEARNER_DATA"]))
    else:
        start, out = Path(rest[0]).resolve(), Path(rest[1]).resolve()
        shutil.rmtree(out, ignore_errors=True)
        {"ours": ours, "trl": with_trl}[what](start, out, Clock(float(rest[2])))
    sys.stdout.flush()
    os._exit(0)  # threads, worker processes and vLLM's engine are not waited for


if __name__ == "__main__":
    main()
