"""What agents' definitions tell: the shipped ones, those of AutoRL-Bench, and mistakes in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autorl_hpc.agents import AgentFile, agent_names, load_agent
from autorl_hpc.errors import AutorlError
from autorl_hpc.files.layout import share
from autorl_hpc.records.base import parse_record

REFERENCE: list[tuple[str, dict[str, str]]] = [
    (
        'name: "Claude CLI Agent"\nstart: "start.sh"\nenv_vars:\n  CLAUDE_TIMEOUT: "36000"\n',
        {"CLAUDE_TIMEOUT": "36000"},
    ),
    # As it stands there: the variables lie beside `env_vars`, which is null, and are read by nobody.
    ('name: "Codex CLI Agent"\ndescription: "One-shot"\nenv_vars:\nCODEX_MODEL: "gpt" # a\n', {}),
    ("env_vars:\n  EPOCHS: 1\n  RATIO: 0.1\n  FAST: true\n", {"EPOCHS": "1", "RATIO": "0.1", "FAST": "true"}),
    ("{}\n", {}),
    ("", {}),
    ("start: ./start.sh\nenv_vars:\n  NOTHING:\n  MODEL: m\n", {"NOTHING": "", "MODEL": "m"}),
]


ODD_PATHS = ("../start.sh", "bin/../start.sh", "/start.sh", ".git/start.sh", "bin//start.sh")


def folder(places: Path, name: str, text: str, file: str = "agent.yaml") -> Path:
    made = places / name
    made.mkdir(parents=True)
    (made / file).write_text(text)
    (made / "start.sh").write_text("true\n")
    return made


@pytest.mark.parametrize(("text", "env"), REFERENCE)
def test_folders_of_autorl_bench_load_unchanged(tmp_path: Path, text: str, env: dict[str, str]) -> None:
    folder(tmp_path, "theirs", text, "config.yaml")
    agent = load_agent("theirs", [tmp_path])
    assert (agent.name, agent.file.env, agent.file.start) == ("theirs", env, "start.sh")
    assert agent.file.driver is not None and not agent.file.driver.required and not agent.file.prompt
    assert agent_names([tmp_path]) == ["theirs"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: other\ndescription: d\n", "is in a folder named mine"),
        ("name: mine\ndescription: d\ncheck: check.sh\n", "lacks check.sh"),
        ("name: mine\ndescription: d\nresume: again.sh\n", "lacks again.sh"),
        ("name: mine\ndescription: d\ndriver: {dialekt: gemini}\n", "did you mean `dialect`"),
        ("name: mine\ndescription: d\nenv: {'A B': c}\n", "field `env.A B"),
        ("name: mine\ndescription: d\nversions: []\n", "field `versions`"),
        *((f"name: mine\ndescription: d\nstart: {path}\n", "field `start`") for path in ODD_PATHS),
        *(  # what `doctor` and the dry run print would steer the terminal
            (f'name: mine\ndescription: d\n{field}: "\\e[2Jx"\n', f"field `{field}")
            for field in ("install", "program", "versions")
        ),
        ('name: mine\ndescription: "\\x9b2J"\n', "field `description`"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: str) -> None:
    folder(tmp_path, "mine", text)
    with pytest.raises(AutorlError) as caught:
        load_agent("mine", [tmp_path])
    assert words in str(caught.value)


def test_words_of_older_definitions_are_understood() -> None:
    value = {"name": "a", "description": "d", "version_tested": "trl 1.16.0", "driver": "none"}
    file = parse_record(AgentFile, value, "agent.yaml")
    assert file.versions == ("trl 1.16.0",) and file.driver is None


def test_includes_stay_in_the_agents_folder(tmp_path: Path) -> None:
    """Catches an include that takes the root's vault along into a workspace: by its name beside the agents' folder, or by a link."""
    (tmp_path / "vault").mkdir()
    mine = folder(tmp_path / "agents", "mine", "name: mine\ndescription: d\ninclude: [vault]\n")
    with pytest.raises(AutorlError, match="lacks vault/"):
        load_agent("mine", [mine.parent])
    (mine.parent / "vault").symlink_to(tmp_path / "vault")
    with pytest.raises(AutorlError, match="vault is a link"):
        load_agent("mine", [mine.parent])
    (mine / "agent.yaml").write_text("name: mine\ndescription: d\ninclude: [accelerate]\n")
    assert load_agent("mine", [mine.parent]).folders()[1] == share("templates") / "accelerate"


def test_a_definition_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text("{the held-out answer")
    mine = folder(tmp_path / "agents", "mine", "")
    (mine / "agent.yaml").unlink()
    (mine / "agent.yaml").symlink_to(tmp_path / "items.jsonl")
    with pytest.raises(AutorlError, match="is a link") as found:
        load_agent("mine", [mine.parent])
    assert "held-out" not in str(found.value)


def test_what_a_definition_asks_for_is_listed(tmp_path: Path) -> None:
    """What `launch --dry-run` prints of it: secrets and variables by name, what is brought along, what runs on this host."""
    text = "name: mine\ndescription: d\nsecrets: [HF_TOKEN]\nenv: {LD_PRELOAD: x.so}\ninclude: [accelerate]\nprogram: [prog, -v]\n"
    mine = folder(tmp_path / "agents", "mine", text)
    said = "; ".join(load_agent("mine", [mine.parent]).asks_for())
    assert all(word in said for word in ("HF_TOKEN", "LD_PRELOAD", "accelerate", "prog -v"))
