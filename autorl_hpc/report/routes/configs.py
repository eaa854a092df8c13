"""Read trainers' configuration files (flat keys with lines), and the route that a trainer's program or configuration asks for.

Files are read line by line; YAML aliases, anchors and tags are not resolved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from autorl_hpc.report.routes.commands import Command, matching, options
from autorl_hpc.report.routes.trainers import ADVANTAGE_ESTIMATORS, MODULES, RL_WORDS, STAGES, TRL_COMMANDS
from autorl_hpc.states import Route

ENDINGS = (".yaml", ".yml", ".json", ".toml")
MAX_ITEMS = 2_000
_LINE = re.compile(r"^\s*(?:- +)?[\"']?([\w.\-]{1,120})[\"']?\s*[:=]\s*(\S.{0,300}?)\s*,?$")
_JSON = re.compile(r"\"([^\"\\\n]{1,120})\"\s*:\s*(\"[^\"\\\n]{0,300}\"|[-+\w.]{1,40})")
_TORCHTUNE = {
    "grpo": Route.GRPO,
    "ppo": Route.PPO,
    "dpo": Route.DPO,
    "kd": Route.DISTILLATION,
    "knowledge_distillation": Route.DISTILLATION,
}
"""Words in the names of torchtune's recipes; all other recipes are supervised."""


class ConfigItem(NamedTuple):
    """One key of a configuration file, without its parent keys."""

    key: str
    value: str
    line: int


class ConfiguredRoute(NamedTuple):
    """The route that a program or a configuration asks for; None: it trains no policy."""

    route: Route | None
    why: str
    path: str | None = None
    """The configuration file that was used."""


def items(text: str, path: str) -> list[ConfigItem]:
    """Return keys and values in the file's order, at most MAX_ITEMS."""
    found: list[ConfigItem] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if len(found) >= MAX_ITEMS:
            break
        if path.endswith(".json"):
            found += [ConfigItem(m[1], m[2].strip('"'), number) for m in _JSON.finditer(line[:20_000])]
        elif len(line) <= 2_000 and not line.lstrip().startswith("#") and (match := _LINE.match(line)) is not None:
            value = re.split(r"\s#", match[2], maxsplit=1)[0].strip().strip("'\"")
            found.append(ConfigItem(match[1].rsplit(".", 1)[-1], value, number))
    return found[:MAX_ITEMS]


def asked_by_config(text: str, path: str) -> ConfiguredRoute | None:
    """Return what a trainer's configuration asks for; None if it is no known trainer's configuration."""
    keys = {item.key: item.value for item in reversed(items(text, path))}
    if "merge_method" in keys and keys.keys() & {"model", "dtype", "base_model"}:
        return ConfiguredRoute(Route.AVERAGING, "configuration of mergekit", path)
    if (estimator := keys.get("adv_estimator", keys.get("advantage_estimator"))) is not None:
        return ConfiguredRoute(
            ADVANTAGE_ESTIMATORS.get(estimator.lower(), Route.UNKNOWN), "configuration of verl", path
        )
    if keys.get("stage") in STAGES and keys.keys() & {"finetuning_type", "template", "dataset"}:
        route = STAGES[keys["stage"]]
        if route is Route.DPO:
            route = RL_WORDS.get(keys.get("pref_loss", "dpo").replace("sigmoid", "dpo"), Route.UNKNOWN)
        return ConfiguredRoute(route, "configuration of LLaMA-Factory", path)
    if "base_model" in keys and keys.keys() & {"sequence_len", "micro_batch_size", "adapter", "rl"}:
        route = RL_WORDS.get(keys["rl"].lower(), Route.UNKNOWN) if "rl" in keys else Route.SFT
        return ConfiguredRoute(route, "configuration of axolotl", path)
    return None


def asked_by_command(command: Command, files: Mapping[str, str]) -> ConfiguredRoute | None:
    """Return what a trainer's program asks for (`trl sft`, `tune run`, `python -m verl...`); None if it is not a trainer."""
    given, name = options(command.args), command.target
    word = command.args[0] if command.args else ""
    path = next((p for a in command.args if a.endswith(ENDINGS) and (p := matching(a, files)) is not None), None)
    if command.kind == "module" and name in MODULES:
        if name in ("axolotl.cli.train", "llamafactory.cli"):
            return (asked_by_config(files[path], path) if path else None) or ConfiguredRoute(Route.UNKNOWN, name)
        estimator = given.get("algorithm.adv_estimator", given.get("advantage_estimator"))
        by_option = estimator is not None and MODULES[name] is Route.PPO
        route = ADVANTAGE_ESTIMATORS.get(str(estimator).lower(), Route.UNKNOWN) if by_option else MODULES[name]
        return ConfiguredRoute(route, name, path)
    if command.kind != "program":
        return None
    if name.startswith("mergekit"):
        return ConfiguredRoute(Route.AVERAGING, "mergekit", path)
    if name == "trl" and word in TRL_COMMANDS:
        other_loss = word == "dpo" and given.get("loss_type", "sigmoid") != "sigmoid"
        return ConfiguredRoute(Route.PREFERENCE if other_loss else TRL_COMMANDS[word], f"trl {word}", path)
    if name == "swift" and word in ("sft", "pt", "rlhf"):
        kind = RL_WORDS.get(given.get("rlhf_type", ""), Route.UNKNOWN)
        return ConfiguredRoute(kind if word == "rlhf" else Route.SFT, f"swift {word}", path)
    if name == "tune" and word == "run":
        recipe = " ".join(command.args[1:])
        return ConfiguredRoute(next((r for w, r in _TORCHTUNE.items() if w in recipe), Route.SFT), "torchtune", path)
    if name in ("llamafactory-cli", "axolotl") and word == "train":
        if "stage" in given:
            return ConfiguredRoute(STAGES.get(given["stage"], Route.UNKNOWN), name)
        return (asked_by_config(files[path], path) if path else None) or ConfiguredRoute(Route.UNKNOWN, name, path)
    return None
