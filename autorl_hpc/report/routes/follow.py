"""Follows commands through the scripts of one revision: shell scripts, Python scripts, trainers' programs, and what these start."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence

from autorl_hpc.report.routes import configs
from autorl_hpc.report.routes.commands import Command, matching, options, positional
from autorl_hpc.report.routes.events import Event
from autorl_hpc.report.routes.names import ADVANTAGE_ESTIMATORS, MODULES, RL_WORDS, STAGES, TRL_COMMANDS
from autorl_hpc.report.routes.reading import Source, read
from autorl_hpc.report.routes.scopes import Scopes
from autorl_hpc.report.routes.shell import Arms, ShellScript, script
from autorl_hpc.report.routes.values import Values
from autorl_hpc.report.routes.walk import Walk
from autorl_hpc.states import Route

MAX_RUNS = 60
"""Scripts followed in one analysis."""
MAX_DEPTH = 6
"""Scripts that start scripts."""

MODEL_WORDS = re.compile(r"model|ckpt|checkpoint|base|weights|output|qwen|llama|smol|gemma|mistral", re.I)
"""What the path of a model's folder says: a copied folder of data or code is no route."""

_LAUNCHERS_OF_TRAINERS = ("axolotl.cli.train", "llamafactory.cli", "axolotl")


_Key = tuple[str, str, tuple[str, ...], tuple[tuple[str, str], ...]]
"""Kind, target, arguments and environment of an invocation."""


class Follower:
    """One analysis of one revision."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self.sources: dict[str, Source] = dict(sources)
        self.events: list[Event] = []
        self.ran: list[tuple[str, Values, Walk]] = []
        """Python scripts followed, with what they know and reached."""
        self.programs: list[tuple[str, Command, Event]] = []
        """Trainers' programs that are run, with the place of the command."""
        self.used: dict[str, None] = {}
        """Files that something ran, in order."""
        self.notes: list[str] = []
        self.guessed = False
        """No command was of this code: what would run, and in which order, is a guess."""
        self._depth = 0
        self._seen: set[_Key] = set()

    def run(self, command: Command, at: Event, arms: Arms = (), beside: str = "") -> bool:
        """Follows a command; `at` is where it stands. False: nothing of this code is run by it."""
        bare = (command.kind, command.target, command.args)
        key = (*bare, command.env)
        # a process that was seen has no environment; if a script started it, that one is followed with its own
        known = key in self._seen or (not command.env and any(one[:3] == bare for one in self._seen))
        if self._depth >= MAX_DEPTH or len(self._seen) >= MAX_RUNS or known:
            return known
        self._depth += 1
        try:
            return self._run(command, at, arms, beside or posixpath.dirname(at.path), key)
        finally:
            self._depth -= 1

    def _run(self, command: Command, at: Event, arms: Arms, beside: str, key: _Key) -> bool:
        if command.kind in ("script", "shell"):
            path = matching(command.target, self.sources, beside)
            if path is None:
                return self._unknown_script(command, at, arms)
            self._seen.add(key)
            self.file(path, command, arms)
            return True
        self._seen.add(key)
        if command.kind == "inline":
            return self._python(read(at.path + "#inline.py", command.target), command, arms, at)
        if command.kind == "shell-text":
            return self._lines(script(command.target, at.path, command.args, command.env), at.path, arms, at)
        if command.kind == "module":
            return self._module(command, at, arms, beside)
        if command.kind == "program":
            return self._program(command, at, arms, beside)
        return False

    def file(self, path: str, command: Command, arms: Arms = ()) -> None:
        """Follows a file as a script."""
        self.used.setdefault(path)
        source = self.sources[path]
        if path.endswith((".sh", ".bash", ".slurm", ".sbatch")) or source.text.startswith(("#!/bin/bash", "#!/bin/sh")):
            self._lines(script(source.text, path, command.args, command.env), path, arms, None)
        elif source.tree is not None:
            self._python(source, command, arms, None)
        elif source.words:
            self._words(source, arms)

    def _lines(self, found: ShellScript, path: str, arms: Arms, at: Event | None) -> bool:
        for name, text in found.files.items():
            self.sources.setdefault(name, read(name, text))
        ran = False
        for line in found.lines:
            place = at or Event("train", path, line.number, line.text)
            here = Event("train", place.path, place.line, line.text if at is None else place.says)
            ran |= self.run(line.command, here, (*arms, *line.arms), posixpath.dirname(path))
        return ran

    def _python(self, source: Source, command: Command, arms: Arms, at: Event | None) -> bool:
        if source.tree is None:
            return False
        values = Values(self.sources, Scopes(), command.args, dict(command.env))

        def started(inner: Command, place: Event, inner_arms: Arms) -> None:
            self.events += walk.events[len(taken) :]
            taken.extend(walk.events[len(taken) :])
            for name, text in walk.files.items():
                self.sources.setdefault(name, read(name, text))
            self.run(inner, place, (*arms, *inner_arms), posixpath.dirname(source.path))

        taken: list[Event] = []
        number = len(self.ran) + 1
        walk = Walk(values, started, number)
        self.ran.append((source.path, values, walk))
        try:
            walk.script(source)
        except RecursionError:  # an expression nested thousands deep: what was met before it counts
            self.notes.append(f"{source.path}: nested too deeply, followed in part")
        for event in walk.events:
            event.arms = (*arms, *event.arms)
            if at is not None and event.path == source.path:
                event.path, event.line = at.path, at.line
        self.events += walk.events[len(taken) :]
        return True

    def _words(self, source: Source, arms: Arms) -> None:
        """A file without a tree: the last trainer's name in it that is not only imported, as a guess."""
        from autorl_hpc.report.routes.names import TRAINER_CLASSES

        for word, line in source.words:
            text = source.line(line)
            if word in TRAINER_CLASSES and f"{word}(" in text and not text.startswith(("class ", "def ")):
                self.events.append(
                    Event(
                        "train",
                        source.path,
                        line,
                        text,
                        TRAINER_CLASSES[word],
                        f"{word}, by a look at words only",
                        arms,
                        sure=0.4,
                    )
                )

    # -- programs of trainers --------------------------------------------------------------------------------------

    def _told(self, command: Command, at: Event, arms: Arms, route: Route | None, why: str) -> bool:
        given = options(command.args)
        idle = any(given.get(name) in ("0", "0.0") for name in ("max_steps", "num_train_epochs", "learning_rate"))
        what = "no-policy" if route is None else "zero" if idle else "train"
        event = Event(what, at.path, at.line, at.says, route or Route.UNKNOWN, why, arms)  # type: ignore[arg-type]
        event.reads = frozenset(
            posixpath.basename(v.rstrip("/")) for v in (*given.values(), *positional(command.args)) if len(v) > 2
        )
        event.script = 1000 + len(self._seen)
        self.events.append(event)
        self.programs.append((why, command, at))
        return True

    def _module(self, command: Command, at: Event, arms: Arms, beside: str) -> bool:
        name = command.target
        stem = name.replace(".", "/")
        local = matching(f"{stem}.py", self.sources, beside) or matching(f"{stem}/__main__.py", self.sources, beside)
        if local is not None:
            self.file(local, command, arms)
            return True
        if name.startswith(_LAUNCHERS_OF_TRAINERS):
            return self._by_config(command, at, arms, beside, name)
        if name not in MODULES:
            return False
        route = MODULES[name]
        given = options(command.args)
        estimator = given.get("algorithm.adv_estimator") or given.get("advantage_estimator")
        if estimator is not None and route is Route.PPO:
            route = ADVANTAGE_ESTIMATORS.get(estimator.lower(), Route.RL)
        return self._told(command, at, arms, route, f"{name}{f' with {estimator}' if estimator else ''}")

    def _program(self, command: Command, at: Event, arms: Arms, beside: str) -> bool:
        args = command.args
        word = args[0] if args else ""
        if command.target == "trl" and word in TRL_COMMANDS:
            route = TRL_COMMANDS[word]
            if route is Route.DPO and options(args).get("loss_type") in ("ipo", "simpo", "hinge"):
                route = Route.PREFERENCE
            return self._told(command, at, arms, route, f"trl {word}")
        if command.target == "swift" and word in ("sft", "pt", "rlhf"):
            kind = options(args).get("rlhf_type", "dpo")
            return self._told(
                command, at, arms, RL_WORDS.get(kind, Route.RL) if word == "rlhf" else Route.SFT, f"swift {word}"
            )
        if command.target in ("llamafactory-cli", "axolotl") and word == "train":
            return self._by_config(command, at, arms, beside, command.target)
        if command.target == "tune" and word == "run":
            return self._torchtune(command, at, arms)
        if command.target.startswith("mergekit"):
            self.events.append(Event("average", at.path, at.line, at.says, Route.AVERAGING, "mergekit", arms))
            self._use_configs(command, beside)
            return True
        if command.target in ("cp", "rsync"):
            return self._copy(command, at, arms)
        return False

    def _copy(self, command: Command, at: Event, arms: Arms) -> bool:
        recursive = command.target == "rsync" or any(a.startswith("-") and set("raR") & set(a) for a in command.args)
        words = [a for a in command.args if not a.startswith("-")]
        from_model = len(words) >= 2 and MODEL_WORDS.search(" ".join(words[:-1])) is not None
        if (recursive and from_model) or any("safetensors" in w for w in words[:-1]):
            made = Event("copy", at.path, at.line, at.says, Route.COPY, f"`{command.target}` of a folder", arms)
            made.reads = frozenset(posixpath.basename(w.rstrip("/*")) for w in words[:-1])
            self.events.append(made)
        return False

    def _by_config(self, command: Command, at: Event, arms: Arms, beside: str, name: str) -> bool:
        given = options(command.args)
        if "stage" in given:
            route = STAGES.get(given["stage"], Route.SFT)
            return self._told(command, at, arms, route, f"{name} --stage {given['stage']}")
        for path in self._use_configs(command, beside):
            asked = configs.asked(configs.items(self.sources[path].text, path))
            if asked is not None:
                place = Event("train", path, asked.line, self.sources[path].line(asked.line))
                return self._told(command, place, arms, asked.route, f"{name} with {path}")
        return self._told(command, at, arms, Route.UNKNOWN, f"{name} with a configuration that is not in the code")

    def _use_configs(self, command: Command, beside: str) -> list[str]:
        found = [matching(a, self.sources, beside) for a in command.args if a.endswith(configs_end)]
        for path in found:
            if path is not None:
                self.used.setdefault(path)
        return [path for path in found if path is not None]

    def _torchtune(self, command: Command, at: Event, arms: Arms) -> bool:
        recipe = next(
            (a for a in command.args[1:] if not a.startswith("-") and not a.isdigit() and not a.endswith(configs_end)),
            "",
        )
        words = (
            ("grpo", Route.GRPO),
            ("ppo", Route.PPO),
            ("dpo", Route.DPO),
            ("knowledge_distillation", Route.DISTILLATION),
        )
        route = next((r for word, r in words if word in recipe), Route.SFT)
        self._use_configs(command, posixpath.dirname(at.path))
        return self._told(command, at, arms, route, f"torchtune recipe {recipe}")

    def _unknown_script(self, command: Command, at: Event, arms: Arms) -> bool:
        """A script that is not in the code: a trainer's own, told by its options."""
        given = options(command.args)
        if given.get("stage") in STAGES and ("finetuning_type" in given or "template" in given):
            return self._told(command, at, arms, STAGES[given["stage"]], f"{command.target} --stage {given['stage']}")
        name = posixpath.basename(command.target)
        if name in ("main_ppo.py", "fsdp_sft_trainer.py"):
            module = Command("module", f"verl.trainer.{name[:-3]}", command.args, command.env)
            return self._module(module, at, arms, "")
        return False


configs_end = (".yaml", ".yml", ".json", ".toml")


def roots(sources: Mapping[str, Source]) -> list[str]:
    """Scripts that nothing else in the code runs or imports: what a person would start, in the order of their names."""
    scripts = [
        p
        for p, s in sources.items()
        if p.endswith((".py", ".ipynb", ".pyw")) or p.endswith((".sh", ".bash", ".slurm", ".sbatch"))
    ]
    started: set[str] = set()
    for path in scripts:
        text = sources[path].text
        for other in scripts:
            if other == path:
                continue
            name = posixpath.basename(other)
            if (name in text and _runs(sources[path], name)) or (
                other.endswith(".py") and path.endswith((".py", ".ipynb")) and _imports(sources[path], name[:-3])
            ):
                started.add(other)
    return [p for p in scripts if p not in started]


def _runs(source: Source, name: str) -> bool:
    return any(name in line.split("#", 1)[0] for line in source.lines if name in line)


def _imports(source: Source, module: str) -> bool:
    if module not in source.text:
        return False
    return any(
        module in line
        and line.lstrip().startswith(("import ", "from "))
        and module in line.replace(",", " ").replace(".", " ").split()
        for line in source.lines
    )


_TELLING = ("train", "zero", "average", "change")
"""What a command that is no file of this code must do to stand for it: `python -c "import torch"` doesn't."""


def followed(sources: Mapping[str, Source], commands: Sequence[Command]) -> Follower:
    """The code followed from the commands that were seen, or from its roots where none of them is of this code."""
    follower = Follower(sources)
    for number, command in enumerate(commands, start=1):
        at = Event("train", "process", 0, f"{command.target} {' '.join(command.args)}"[:300])
        before = len(follower.events)
        follower.run(command, at)
        _rooted(follower.events[before:], number)
    if not follower.used and not any(e.what in _TELLING for e in follower.events):
        follower.guessed = True
        for number, path in enumerate(roots(follower.sources), start=1):
            before = len(follower.events)
            follower.file(path, Command("script", path))
            _rooted(follower.events[before:], number)
    return follower


def _rooted(events: Sequence[Event], number: int) -> None:
    for event in events:
        event.root = number
