"""ALFWorld's text games on TextWorld, and ReAct's way of asking for actions.

The game's logic and every word of its text are TextWorld's (`textworld[pddl]` 1.7.0) on the official games. Only what it does
again and again is done once: the translation of a game to SAS (four times a game in the stock environment) is kept, the
grammar is parsed once a process, parsed templates and conditions are kept, and commands are worked out where one is compared
or asked for. `benchmarks/bench-alfworld` compares every observation with the stock environment's.

For training: `goals(data)` gives the training games; see `autorl_hpc.rollouts.episodes.run_episodes`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
import lzma
import re
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from autorl_hpc.rollouts.environment import Step, Transcript

DOMAIN, GRAMMAR = "pddl_domain.in_games.pddl", "grammar.in_games.twl2"
PROMPTS, TRAIN = "react_prompts.json", "train.jsonl.xz"
UNKNOWN_GOAL = "UNKNOWN GOAL."
"""Stands in the grammar of all games for the one sentence that differs."""

KEPT_GAMES = 256
"""Translated games kept a process: more than a split has, 0.7 MB each with their facts."""

PLANNERS = 32
"""Copies of the planner's library a process, 2 MB of memory each; an environment beyond them shares one."""

KEPT_FACTS = 300_000
"""TextWorld keeps every fact that it ever made, 3 GB after all training games; above this many it is made to forget them."""

ADMISSIBLE = "You can: "
PUT = re.compile(r"put (?P<what>.+) in/on (?P<where>.+)")
"""The placing action of ReAct's examples. These games know it as `move X to Y` only."""

EXAMPLES = {
    "pick_and_place": "put",
    "pick_clean_then_place": "clean",
    "pick_heat_then_place": "heat",
    "pick_cool_then_place": "cool",
    "look_at_obj": "examine",
    "pick_two_obj": "puttwo",
}
"""Beginning of a task type: kind of the examples, as in ReAct's alfworld.ipynb."""


def goals(data: Path) -> Iterator[dict[str, Any]]:
    """The training games, one after the other; a list of all takes 400 MB."""
    with lzma.open(Path(data) / TRAIN, "rt", encoding="utf-8") as file:
        for line in file:
            yield goal_of(json.loads(line))


def goal_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """A packed game's row as a goal; `cluster` is the task that several trials share."""
    return {
        "id": row["id"],
        "question": row["task"],
        "cluster": row["id"].split("/")[1],
        "task_type": row["task_type"],
        "pddl_problem": row["pddl_problem"],
        "walkthrough": row["walkthrough"],
    }


class Dialogue:
    """ReAct's text prompt: two examples of the task's kind, then the episode. The examples' text is a staged file."""

    def __init__(self, data: Path) -> None:
        self._prompts: dict[str, str] = json.loads((Path(data) / PROMPTS).read_text(encoding="utf-8"))

    def prompt(self, transcript: Transcript) -> str:
        """The reference's prompt, character by character."""
        task_type = transcript.goal["task_type"]
        kind = next(kind for beginning, kind in EXAMPLES.items() if task_type.startswith(beginning))
        examples = self._prompts[f"react_{kind}_1"] + self._prompts[f"react_{kind}_0"]
        history = "".join(f" {action}\n{observation}\n>" for action, observation in transcript.turns)
        return (
            f"Interact with a household to solve a task. Here are two examples.\n{examples}"
            f"\nHere is the task.\n{transcript.first}\n>{history}"
        )

    def action(self, completion: str) -> str:
        """The completion without white space around it."""
        return completion.strip()


class Environment:
    """One game after the other.

    Options: `put_means_move` (default true): `put X in/on Y` is taken for `move X to Y`. `show_admissible` (default false):
    each observation ends with a line of the commands that do something.
    """

    def __init__(self, data: Path, options: Mapping[str, Any]) -> None:
        self._put_means_move = bool(options.get("put_means_move", True))
        self._show_admissible = bool(options.get("show_admissible", False))
        self._logic = logic_of(Path(data))
        self._planner = planner(next(_environments) % PLANNERS)
        self._game: Game | None = None
        self._sas = b""
        self._state: Any = None
        self._applied: list[tuple[int, int]] = []

    def reset(self, goal: Mapping[str, Any], seed: int) -> str:
        """Begins a game, in which nothing is drawn at random; its text without the title."""
        self._game = game_of(goal["pddl_problem"], self._logic, self._planner)
        self._sas, self._applied = zlib.decompress(self._game.sas), []
        self._planner.load(self._sas)
        self._state = self._game.fresh_state(self._logic, self._planner.library)
        text = self._derive("#intro#").replace(UNKNOWN_GOAL, goal["question"])
        return self._shown("\n".join(text.split("\n\n")[1:]))

    def step(self, action: str) -> Step:
        """One command. Thinking is answered by `OK.`, what can't be done by `Nothing happens.`; both are steps."""
        self._take_up()
        observation = "OK." if action.startswith("think:") else self._do(action.strip())
        won = bool(self._planner.library.check_goal())
        return Step(self._shown(observation), won, float(won))

    def admissible_commands(self) -> list[str]:
        """All commands that do something now, sorted. Worked out when asked for."""
        self._take_up()
        return sorted({self._command(action) for action in self._state.all_applicable_actions()})

    def close(self) -> None:
        """Forgets the game."""
        self._game, self._sas, self._state = None, b"", None

    def _shown(self, observation: str) -> str:
        if not self._show_admissible:
            return observation
        return f"{observation}\n{ADMISSIBLE}{' | '.join(self.admissible_commands())}"

    def _take_up(self) -> None:
        """Other environments of this process may have used the library since."""
        if self._game is None:
            raise RuntimeError("step before reset")
        self._planner.hold(self, self._sas, self._applied)

    def _do(self, command: str) -> str:
        actions = self._state.all_applicable_actions()
        chosen = next((action for action in actions if self._command(action) == command), None)
        if chosen is None and self._put_means_move and (put := PUT.fullmatch(command)):
            moved = f"move {put['what']} to {put['where']}"
            chosen = next((action for action in actions if self._command(action) == moved), None)
        if chosen is None:
            return "Nothing happens."
        self._applied.append((chosen.id, self._state._operators[chosen.id].nb_effect_atoms))
        self._state.apply(chosen)
        text = self._derive(chosen.feedback_rule, chosen.mapping)
        return text[text.find(". ") + 2 :] if text.startswith("You arrive at loc ") else text

    def _command(self, action: Any) -> str:
        """An action in words. They depend on names and places of receptacles, which never change."""
        assert self._game is not None
        key = (action.name, *(variable.name for variable in action.mapping.values()))
        if key not in self._game.commands:
            names = {name: info.name for name, info in self._game.entities.items()}
            action.command_template = self._derive(action.command_template, action.mapping)
            self._game.commands[key] = action.format_command(names)
        return self._game.commands[key]

    def _derive(self, symbol: str, mapping: Mapping[Any, Any] | None = None) -> str:
        assert self._game is not None
        entities, mapping = self._game.entities, mapping or {}
        context = {
            "state": self._state,
            "facts": [],
            "variables": {placeholder.name: entities[variable.name] for placeholder, variable in mapping.items()},
            "mapping": mapping,
            "entity_infos": entities,
        }
        text: str = self._logic.grammar.derive(symbol, context)
        return text


class Planner:
    """A copy of Fast Downward's library. It holds one game at a time; another one's is loaded in some milliseconds and brought to where
    it stood: more than the step itself takes."""

    def __init__(self) -> None:
        interface, loaded = library().fast_downward.interface, loaded_part()
        with tempfile.NamedTemporaryFile() as file:
            file.write(loaded)
            file.flush()
            interface.DOWNWARD_LIB_PATH = file.name
            self.library = interface.load_lib()
        self._holder: object = None

    def hold(self, holder: object, sas: bytes, applied: Sequence[tuple[int, int]]) -> None:
        """Makes the library hold this game, with these operators (id, number of effects) applied, unless it does."""
        if self._holder is holder:
            return
        self.load(sas)
        for operator, effects in applied:
            self.library.apply_operator(operator, (library().fast_downward.Atom * effects)())
        self._holder = holder

    def load(self, sas: bytes) -> None:
        """Makes the library hold the beginning of a game that is nobody's yet."""
        self._holder = None
        self.library.load_sas(sas)


@dataclass
class Game:
    """A translated game."""

    sas: bytes  # compressed
    actions: dict[str, Any]
    types: dict[str, str]
    facts: list[Any]
    entities: dict[str, Any]
    commands: dict[tuple[str, ...], str] = field(default_factory=dict)

    def fresh_state(self, logic: Any, downward: Any) -> Any:
        """The state at the game's beginning; the planner's library must hold the same game."""
        tw = library()
        state = tw.pddl.PddlState.__new__(tw.pddl.PddlState)
        tw.logic.State.__init__(state, tw.logic.GameLogic())
        state._logic, state.downward_lib = logic, downward
        state._actions, state.name2type = self.actions, self.types
        state.add_facts(self.facts)
        return state


_games: dict[str, Game] = {}


def game_of(problem: str, logic: Any, planner: Planner) -> Game:
    """A game's translation, kept for the next time it is played in this process."""
    game = _games.pop(problem, None) or _translate(problem, logic, planner)
    if len(library().kept_facts) > KEPT_FACTS:
        library().kept_facts.clear()  # equal facts are made again: they are compared by value
    _games[problem] = game  # to the end: the oldest goes first
    if len(_games) > KEPT_GAMES:
        del _games[next(iter(_games))]
    return game


def _translate(problem: str, logic: Any, planner: Planner) -> Game:
    """What TextWorld's PddlState does on construction, without its second translation, which only its planner needs."""
    tw = library()
    task, sas = tw.fast_downward.pddl2sas(logic.domain, problem)
    for kind in task.types:
        try:
            logic.types.add(tw.logic.Type(kind.name, kind.supertype_names))
        except ValueError:
            pass  # known from an earlier game
    types = {thing.name: thing.type_name for thing in task.objects}
    facts = [
        tw.logic.Proposition(atom.predicate, [tw.logic.Variable(name, types[name]) for name in atom.args])
        for atom in task.init
        if isinstance(atom, tw.fast_downward.translate.pddl.conditions.Atom) and atom.predicate != "="
    ]
    planner.load(sas.encode("utf-8"))
    atoms = (tw.pddl.Atom * planner.library.get_state_size())()
    planner.library.get_state(atoms)
    facts += [fact for fact in (atom.get_fact(types) for atom in atoms) if not fact.is_negation]
    actions = {
        action.name: SimpleNamespace(
            parameters=[SimpleNamespace(name=p.name, type_name=p.type_name) for p in action.parameters]
        )
        for action in task.actions
    }
    return Game(zlib.compress(sas.encode("utf-8"), 1), actions, types, facts, _entities(facts))


def _entities(facts: list[Any]) -> dict[str, Any]:
    """Things with their names: `Desk_bar_...` is `desk 1`, numbered against the sorted order of ids, as in ALFWorld."""
    tw = library()
    kinds = {variable.name: variable.type for fact in facts for variable in fact.arguments}
    entities = {name: tw.EntityInfo(name, kind) for name, kind in kinds.items()}
    demangler = tw.Demangler(game_infos={name: SimpleNamespace(id=name) for name in kinds})
    for name, info in entities.items():
        info.name, info.definite, info.indefinite = demangler.demangle_alfred_name(name), "the", "a"
    return entities


@functools.cache
def logic_of(data: Path) -> Any:
    """Domain and grammar, parsed once a process."""
    return library().pddl.GameLogic(
        (data / DOMAIN).read_text(encoding="utf-8"), (data / GRAMMAR).read_text(encoding="utf-8")
    )


_environments = itertools.count()


@functools.cache
def loaded_part() -> bytes:
    """Fast Downward's library without what only debuggers read, behind its last segment: 1.1 of 34 MB. Of another format than ELF, all."""
    data = Path(library().fast_downward.interface.DOWNWARD_LIB_PATH).read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        return data
    (first,), (size, number) = struct.unpack_from("<Q", data, 32), struct.unpack_from("<HH", data, 54)
    segments = (struct.unpack_from("<IIQQQQ", data, first + size * n) for n in range(number))
    return data[: max(offset + length for kind, _, offset, _, _, length in segments if kind == 1)]


@functools.cache
def planner(number: int) -> Planner:
    """One of the process's own: environments that share one take turns."""
    del number
    return Planner()


@functools.cache
def library() -> SimpleNamespace:
    """TextWorld's parts, imported where they are needed, with parsed texts kept.

    Raises:
        ModuleNotFoundError: textworld or fast_downward is not installed: pip install 'autorl-hpc[alfworld]'.
    """
    import fast_downward
    from alfworld.agents.utils.misc import Demangler
    from mementos.core import _memento_cache
    from textworld import logic
    from textworld.envs.pddl import logic as pddl
    from textworld.envs.pddl import textgen
    from textworld.generator.game import EntityInfo

    original = textgen._parse_and_convert
    parse = functools.cache(lambda text, rule_name: original(text, rule_name=rule_name))

    def symbols(text: str, rule_name: str, trace: bool = False) -> list[Any]:
        return [copy.copy(symbol) for symbol in parse(text, rule_name)]  # copies: a context is hung on each

    def copy_context(context: dict[str, Any]) -> dict[str, Any]:
        return {**context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])}

    textgen._parse_and_convert = symbols
    textgen.copy_context = copy_context  # the original copies the things themselves, which nothing changes
    logic.Rule.parse_conjunctive_query = functools.cache(logic.Rule.parse_conjunctive_query)
    return SimpleNamespace(
        fast_downward=fast_downward,
        Demangler=Demangler,
        EntityInfo=EntityInfo,
        logic=logic,
        pddl=pddl,
        kept_facts=_memento_cache,
    )
