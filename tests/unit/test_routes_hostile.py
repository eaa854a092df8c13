"""Code that wants to break, stall or mislead the reader of routes and settings, and what settings it finds in sound code."""

from __future__ import annotations

import time

import pytest
from test_routes_planned import files_of

from autorl_hpc.report.routes import planned
from autorl_hpc.states import Route

TRAINER = "from trl import SFTTrainer\nSFTTrainer('m', train_dataset=[]).train()\n"

HOSTILE: dict[str, str | bytes] = {
    "parentheses.py": "x = " + "(" * 10_000 + ")" * 10_000,
    "brackets.py": "x = " + "[" * 100_000,
    "sum.py": "import torch\nx = " + "+".join(["1"] * 50_000),
    "attributes.py": "import torch\nx = torch" + ".a" * 20_000,
    "minus.py": "x = " + "-" * 50_000 + "1",
    "not.py": "if " + "not " * 50_000 + "1: pass",
    "calls.py": "import torch\nf" + "()" * 20_000,
    "elif.py": "x = 0\nif x == 1:\n    pass\n" + "".join(f"elif x == {n}:\n    import torch\n" for n in range(3_000)),
    "continue.py": "for x in y:\n" + "    if x.loss: continue\n" * 5_000 + "    z.append(x)\n",
    "deep.py": "".join(f"{' ' * n}if x:\n" for n in range(90)) + " " * 90 + "pass\n",
    "loops.py": "def f(): return g()\ndef g(): return f()\nclass A(A): pass\nclass B(C): pass\nclass C(B): pass\nx = x\ny = z\nz = y\n"
    "f().train()\nx.train()\ny.train()\nA().train()\nB(x).backward()\n",
    "fan.py": "import torch\n"
    + "".join(f"a{n} = [a{n - 1}, a{n - 1}][k] or a{n - 1} if a{n - 1} else a{n - 1}\n" for n in range(1, 60))
    + "a59.train()\n",
    "calls_of_calls.py": "def f0(): import torch\n"
    + "".join(f"def f{n}():\n    f{n - 1}()\n    f{n - 1}()\n" for n in range(1, 100))
    + "f99()\n",
    "many.py": "import torch\n"
    + "".join(f"def f{n}(x):\n    return f{n + 1}(x) + x.loss\n" for n in range(1_000))
    + "f0(y).backward()\n",
    "terms.py": "import torch\nloss = " + " * ".join(["reward"] * 900) + "\nloss.backward()\n",
    "power.py": "import torch\nx = 10 ** 10 ** 10 ** 10\ny = 'a' * 10 ** 12\nz = 1e308 * 1e308 - 1 % 0\nif x: z.train()\n",
    "nulls.py": "import torch\0\nx = 1\n" + TRAINER,
    "bytes.py": bytes(range(256)) * 50,
    "surrogate.py": "x = '\ud800'\nimport torch\n",
    "huge.py": "import torch\n" + "x = 1\n" * 70_000,
    "big.json": '{"a": ' * 50_000,
    "big.yaml": "a: &a [x, x]\n" + "".join(f"b{n}: &b{n} [*a, *a, *a]\n" for n in range(500)),
    "quotes.sh": "echo '" + "a\n'" * 5_000,
    "ifs.sh": "if true; then\n" * 5_000,
    "functions.sh": "".join(f"f{n}() {{\nf{n + 1}\nf{n + 1}\n}}\n" for n in range(500)) + "f0\n",
    "itself.sh": "bash itself.sh\nsource itself.sh\n./itself.sh\npython itself.py\n",
    "itself.py": "import itself, subprocess, os\nsubprocess.run(['python', 'itself.py'])\nos.system('bash itself.sh')\nexec(open('itself.py').read())\n",
    "here.sh": "cat <<EOF > x.py\n" * 2_000,
    "blanks.py": "import torch\n" + " " * 300_000 + "x",
    "empty.py": "",
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_no_file_stops_the_reader(name: str) -> None:
    began = time.process_time()
    assert planned({name: HOSTILE[name], "train.py": TRAINER}, ["python train.py"]).route is Route.SFT
    assert planned({name: HOSTILE[name]}).route in Route
    assert time.process_time() - began < 20


def test_evidence_is_harmless_to_show_and_the_order_of_files_makes_no_difference() -> None:
    told = planned({"a\x1b[31m\n.py": TRAINER.replace("'m'", "'\x1b]0;x\x07<script>'") + "\n"})
    assert told.route is Route.SFT
    assert all("\x1b" not in line.where + line.says and "\n" not in line.where + line.says for line in told.evidence)
    files = files_of("sft_rl_two_scripts") | files_of("rejection_sampling_files")
    assert planned(files) == planned(dict(reversed(files.items())))


SETTINGS = [
    ("twist_zero_steps", {"max_steps": ["0"]}),  # a dict that is unpacked
    # configurations of trainers
    ("llamafactory_sft", {"learning_rate": ["1.0e-4"]}),
    ("axolotl_dpo", {"lora_r": ["16"]}),
    ("verl_grpo", {"actor_rollout_ref.actor.optim.lr": ["1e-6"]}),
]


@pytest.mark.parametrize(("name", "expected"), SETTINGS)
def test_literals_are_settings(name: str, expected: dict[str, list[str]]) -> None:
    found = planned(files_of(name)).settings
    assert {key: [one.value for one in found if one.name == key] for key in expected} == expected


def test_an_expression_is_no_value() -> None:
    code = (
        "from trl import *\nN = 4\nSFTTrainer(m, args=SFTConfig('o', learning_rate=pick(x) * 2, max_steps=N)).train()\n"
    )
    assert [(s.name, s.value, s.where) for s in planned({"a.py": code}).settings] == [("max_steps", "4", "a.py:3")]
