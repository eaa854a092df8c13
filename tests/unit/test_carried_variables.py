"""Variables of an agent's definition begin behind what makes the sandbox, and stand in no argv."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from autorl_hpc.sandbox.sandbox_plan import carried, take_own, with_carried

SHOW = "import json, os; print(json.dumps(dict(os.environ)))"
OWN = {
    "LD_PRELOAD": "",
    "PLAIN": "a b=c",
    "TWO_LINES": 'one\n$(touch here) `id` "\\',
    "EMPTY": "",
    "PATH": os.environ["PATH"],
}


def test_they_arrive_as_they_are_and_nothing_else_does() -> None:
    command = with_carried([sys.executable, "-c", SHOW])
    env = {"KEPT": "yes", **carried(OWN)}
    assert not any(value and value in word for value in OWN.values() for word in command)
    assert not set(env) & set(OWN)
    done = subprocess.run(["/usr/bin/env", *command], env=env, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    for name in ("PWD", "SHLVL", "_", "OLDPWD", "LC_CTYPE"):  # the shell's, and Python's
        found.pop(name, None)
    assert found == {"KEPT": "yes", **OWN}


def test_those_that_ours_stand_above_are_left() -> None:
    env = {"TASK": "gsm8k", "OWN": "x", "OTHER": "y"}
    assert take_own(env, {"TASK": "mine", "OWN": "x"}) == {"OWN": "x"}
    assert env == {"TASK": "gsm8k", "OTHER": "y"}
