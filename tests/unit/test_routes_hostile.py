"""Code that wants to break, stall or mislead the reader of routes."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from test_routes_planned import SCRIPTS, files_of

from autorl_hpc.report.routes import planned, settings
from autorl_hpc.states import Route

TRAINER = "from trl import SFTTrainer\nSFTTrainer('m', train_dataset=[]).train()\n"

HOSTILE: dict[str, str | bytes] = {
    "parentheses.py": "x = " + "(" * 10_000 + ")" * 10_000,
    "brackets.py": "x = " + "[" * 100_000,
    "sum.py": "import torch\nx = " + "+".join(["1"] * 50_000),
    "attributes.py": "import torch\nx = torch" + ".a" * 20_000,
    "minus.py": "x = " + "-" * 50_000 + "1",
    "not.py": "x = " + "not " * 50_000 + "1",
    "calls.py": "import torch\nf" + "()" * 20_000,
    "lambdas.py": "f = " + "lambda: " * 5_000 + "0",
    "elif.py": "x = 0\nif x == 1:\n    pass\n" + "".join(f"elif x == {n}:\n    import torch\n" for n in range(3_000)),
    "continue.py": "for x in y:\n" + "    if x.loss: continue\n" * 5_000 + "    z.append(x)\n",
    "deep.py": "".join(f"{' ' * n}if x:\n" for n in range(90)) + " " * 90 + "pass\n",
    "deeper.py": "".join(f"{' ' * n}if x:\n" for n in range(300)) + " " * 300 + "pass\n",
    "loops.py": "def f(): return g()\ndef g(): return f()\nclass A(A): pass\nclass B(C): pass\nclass C(B): pass\nx = x\ny = z\nz = y\n"
    "f().train()\nx.train()\ny.train()\nA().train()\nB(x).backward()\n",
    "fan.py": "import torch\n"
    + "".join(f"a{n} = [a{n - 1}, a{n - 1}][k] or a{n - 1} if a{n - 1} else a{n - 1}\n" for n in range(1, 60))
    + "a59.train()\n",
    "calls_of_calls.py": "def f0(): import torch\n"
    + "".join(f"def f{n}():\n    f{n - 1}()\n    f{n - 1}()\n" for n in range(1, 100))
    + "f99()\n",
    "many.py": "import torch\n"
    + "".join(f"def f{n}(x):\n    return f{n + 1}(x) + x.loss\n" for n in range(3_000))
    + "f0(y).backward()\n",
    "terms.py": "import torch\nloss = " + " * ".join(["reward"] * 900) + "\nloss.backward()\n",
    "formatted.py": "import torch\nx = f'" + "{y}" * 5_000 + "'\nx.train()\n",
    "power.py": "import torch\nx = 10 ** 10 ** 10 ** 10\ny = 'a' * 10 ** 12\nz = 1e308 * 1e308 - 1 % 0\nif x: z.train()\n",
    "nulls.py": "import torch\0\nx = 1\n" + TRAINER,
    "latin.py": "# caf\xe9\nimport torch\n".encode("latin-1"),
    "bytes.py": bytes(range(256)) * 50,
    "surrogate.py": "x = '\ud800'\nimport torch\n",
    "huge.py": "import torch\n" + "x = 1\n" * 1_700_000,
    "big.json": '{"a": ' * 50_000,
    "big.yaml": "a: &a [x, x]\n" + "".join(f"b{n}: &b{n} [*a, *a, *a]\n" for n in range(500)),
    "deep.yaml": "".join(f"{' ' * n}k{n}:\n" for n in range(3_000)),
    "notebook.ipynb": '{"cells": ' + "[" * 50_000,
    "cells.ipynb": json.dumps({"cells": [1, None, {"cell_type": "code", "source": 5}]}),
    "quotes.sh": "echo '" + "a\n'" * 5_000,
    "ifs.sh": "if true; then\n" * 5_000,
    "functions.sh": "".join(f"f{n}() {{\nf{n + 1}\nf{n + 1}\n}}\n" for n in range(500)) + "f0\n",
    "itself.sh": "bash itself.sh\nsource itself.sh\n./itself.sh\npython itself.py\n",
    "itself.py": "import itself, subprocess, os\nsubprocess.run(['python', 'itself.py'])\nos.system('bash itself.sh')\nexec(open('itself.py').read())\n",
    "variables.sh": "A=x\n" + 'A="$A$A"\n' * 200 + "python $A\n",
    "dollars.sh": "python " + "${A:-" * 5_000 + "\n",
    "here.sh": "cat <<EOF > x.py\n" * 2_000,
    "blanks.py": "import torch\n" + " " * 300_000 + "x",
    "empty.py": "",
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_no_file_stops_the_reader(name: str) -> None:
    began = time.process_time()
    told = planned({name: HOSTILE[name], "train.py": TRAINER}, ["python train.py"])
    alone = planned({name: HOSTILE[name]})
    assert told.route is Route.SFT
    assert alone == planned({name: HOSTILE[name]})
    assert time.process_time() - began < 60  # three readings


def test_what_was_not_read_is_said() -> None:
    told = planned(
        {"train.py": TRAINER, "huge.py": HOSTILE["huge.py"], "parentheses.py": HOSTILE["parentheses.py"] + "# train"}
    )
    assert any(note.startswith("huge.py: 10,") and "not read" in note for note in told.notes)
    assert any(note.startswith("parentheses.py:") for note in told.notes)


def test_two_thousand_files() -> None:
    files = {
        f"pkg{n % 40}/mod{n}.py": f"import torch\nimport mod{n + 1}\ndef train(): pass\n" * 5 for n in range(2_000)
    }
    began = time.process_time()
    told = planned({**files, "train.py": TRAINER})
    assert told.route is Route.SFT
    assert any("more files were not read" in note for note in told.notes)
    assert time.process_time() - began < 50


def test_fifty_scripts_of_three_hundred_lines_take_seconds() -> None:
    text = (SCRIPTS / "sft_then_grpo_one_file" / "pipeline.py").read_text("utf-8")
    helpers = "".join(
        f"def helper_{n}(rows):\n    kept = [tok(r, max_length={n}) for r in rows]\n    return kept\n"
        for n in range(80)
    )
    files = {f"run{n}.py": helpers + text + f"# {n}\n" for n in range(50)}
    cache: dict[str, Any] = {}
    began = time.process_time()
    first = planned(files, cache=cache)
    assert time.process_time() - began < 10  # 1 s on a quiet core
    assert planned(files, cache=cache) == first == planned(files)
    assert len(cache) == 50 + 1  # the last answer


def test_the_cache_is_bounded() -> None:
    cache: dict[str, Any] = {}
    for n in range(300):
        planned({"a.py": TRAINER + f"# {n}\n"}, cache=cache)
    assert len(cache) <= 256 + 1


@pytest.mark.slow
def test_damaged_scripts_of_all_kinds() -> None:
    chance = random.Random(0)
    names = sorted(p.name for p in SCRIPTS.iterdir() if p.is_dir())
    for _ in range(300):
        files = files_of(chance.choice(names))
        path = chance.choice(sorted(files))
        begin, end = sorted((chance.randrange(len(files[path]) + 1), chance.randrange(len(files[path]) + 1)))
        files[path] = files[path][:begin] + files[path][end:]
        assert planned(files).route in Route
        assert isinstance(settings(files), tuple)


def test_the_order_of_files_makes_no_difference() -> None:
    files = files_of("sft_rl_two_scripts") | files_of("rejection_sampling_files")
    assert planned(files) == planned(dict(reversed(files.items())))


def test_evidence_is_harmless_to_show() -> None:
    told = planned({"a\x1b[31m\n.py": TRAINER.replace("'m'", "'\x1b]0;x\x07<script>'") + "\n"})
    assert told.route is Route.SFT
    assert all("\x1b" not in line.where + line.says and "\n" not in line.where + line.says for line in told.evidence)
