"""Configuration files as flat keys with their lines, and the route that a trainer's configuration asks for.

Read line by line: aliases, anchors and tags are text, so no file can unfold into more than it is. Flow mappings stay text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from autorl_hpc.report.routes.names import ADVANTAGE_ESTIMATORS, RL_WORDS, STAGES
from autorl_hpc.states import Route

MAX_ITEMS = 2_000
MAX_VALUE_CHARS = 300
_YAML = re.compile(r"^(\s*)((?:- +)*)([\w.\-/+@]{1,120}|\"[^\"\n]{1,120}\"|'[^'\n]{1,120}')\s*:(?:\s+(.*))?$")
_TOML = re.compile(r"^\s*([\w.\-\"]{1,120})\s*=\s*(.+)$")
_JSON = re.compile(r"\"([^\"\\\n]{1,120})\"\s*:\s*(\"(?:[^\"\\\n]|\\.){0,300}\"|[-+\w.]{1,40}|\[[^\[\]{}\n]{0,300}\])?")
_LIST_ITEM = re.compile(r"^\s*- +(.*)$")


class ConfigItem(NamedTuple):
    """One key of a configuration file."""

    key: str
    value: str
    line: int

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rsplit(".", 1)[-1]


def items(text: str, path: str) -> list[ConfigItem]:
    """Keys with dots between their levels (JSON: the last level only), in the file's order."""
    lower = path.lower()
    if lower.endswith(".json"):
        return _json(text)
    return _toml(text) if lower.endswith(".toml") else _yaml(text)


def _yaml(text: str) -> list[ConfigItem]:
    found: list[ConfigItem] = []
    levels: list[tuple[int, str]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if len(found) >= MAX_ITEMS:
            break
        if len(line) > 2_000 or line.lstrip().startswith("#"):
            continue
        match = _YAML.match(line.rstrip())
        if match is None:
            if levels and (item := _LIST_ITEM.match(line)) is not None:
                found.append(ConfigItem(".".join(key for _, key in levels), _bare(item[1]), number))
            continue
        depth = len(match[1]) + len(match[2])
        while levels and levels[-1][0] >= depth:
            levels.pop()
        key = match[3].strip("'\"")
        if len(levels) < 20:
            levels.append((depth, key))
        value = _bare(match[4] or "")
        if value:
            found.append(ConfigItem(".".join(each for _, each in levels), value, number))
    return found


def _bare(value: str) -> str:
    value = re.split(r"(?:^|\s)#", value, maxsplit=1)[0].strip()
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        value = value[1:-1]
    return value[:MAX_VALUE_CHARS]


def _toml(text: str) -> list[ConfigItem]:
    found: list[ConfigItem] = []
    section = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if len(found) >= MAX_ITEMS:
            break
        bare = line.strip()
        if len(line) > 2_000:
            continue
        if bare.startswith("[") and bare.endswith("]"):
            section = bare.strip("[] ") + "."
        elif (match := _TOML.match(line)) is not None:
            found.append(ConfigItem(section + match[1].strip('"'), _bare(match[2]), number))
    return found


def _json(text: str) -> list[ConfigItem]:
    found: list[ConfigItem] = []
    number, at = 1, 0
    for match in _JSON.finditer(text):
        if len(found) >= MAX_ITEMS:
            break
        number += text.count("\n", at, match.start())
        at = match.start()
        if match[2]:
            found.append(ConfigItem(match[1], match[2].strip('"')[:MAX_VALUE_CHARS], number))
    return found


def first(known: Sequence[ConfigItem], *names: str) -> ConfigItem | None:
    """The first item whose key, or last part of it, is one of `names`."""
    return next((item for item in known if item.key in names or item.name in names), None)


class ConfiguredRoute(NamedTuple):
    """The route that a configuration asks for; None: it trains no policy."""

    route: Route | None
    line: int
    trainer: str
    """Whose configuration it is."""


def asked(known: Sequence[ConfigItem]) -> ConfiguredRoute | None:
    """What a trainer's configuration asks for; None: it is no configuration of a trainer that we know."""
    names = {item.name for item in known}
    if (method := first(known, "merge_method")) is not None and names & {
        "models",
        "model",
        "slices",
        "dtype",
        "base_model",
    }:
        return ConfiguredRoute(Route.AVERAGING, method.line, "mergekit")
    if (estimator := first(known, "adv_estimator", "advantage_estimator")) is not None:
        return ConfiguredRoute(ADVANTAGE_ESTIMATORS.get(estimator.value.lower(), Route.RL), estimator.line, "verl")
    if (
        (stage := first(known, "stage")) is not None
        and stage.value in STAGES
        and names
        & {
            "finetuning_type",
            "dataset",
            "template",
            "model_name_or_path",
        }
    ):
        return ConfiguredRoute(_by_preference(known, STAGES[stage.value]), stage.line, "LLaMA-Factory")
    if (kind := first(known, "rlhf_type")) is not None:
        return ConfiguredRoute(RL_WORDS.get(kind.value.lower(), Route.RL), kind.line, "ms-swift")
    base = first(known, "base_model")
    if base is not None and names & {"datasets", "adapter", "sequence_len", "micro_batch_size", "rl"}:
        rl = first(known, "rl")
        if rl is not None:
            return ConfiguredRoute(RL_WORDS.get(rl.value.lower(), Route.RL), rl.line, "axolotl")
        return ConfiguredRoute(Route.SFT, base.line, "axolotl")
    if "_component_" in names and names & {"tokenizer", "checkpointer", "dataset", "optimizer", "checkpoint_dir"}:
        loss = next(
            (i for i in known if i.key.startswith(("loss", "rlhf_loss", "dataset")) and i.name == "_component_"),
            known[0],
        )
        return ConfiguredRoute(
            _of_torchtune(" ".join(i.value for i in known if i.name == "_component_")), loss.line, "torchtune"
        )
    return None


def _by_preference(known: Sequence[ConfigItem], route: Route | None) -> Route | None:
    loss = first(known, "pref_loss")
    if route is Route.DPO and loss is not None:
        return RL_WORDS.get(loss.value, Route.DPO) if loss.value != "sigmoid" else Route.DPO
    return route


def _of_torchtune(components: str) -> Route:
    lower = components.lower()
    for word, route in (("grpo", Route.GRPO), ("ppo", Route.PPO), ("dpo", Route.DPO), ("kd_loss", Route.DISTILLATION)):
        if word in lower:
            return route
    return Route.DISTILLATION if "forwardkl" in lower else Route.SFT
