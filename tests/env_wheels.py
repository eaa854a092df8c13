"""Wheels without an index: any, and those of `mini`, made of what is installed here. What it declares and never imports is empty."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from realdata import REPO

MINI = "mini-swe-agent"
USED = {MINI, "jinja2", "markupsafe", "pydantic", "pydantic-core", "annotated-types", "typing-extensions"}
USED |= {"typing-inspection", "rich", "pygments", "markdown-it-py", "mdurl", "platformdirs", "python-dotenv"}
"""What docs/agents.md tells people to install who want it small, with all that these need."""

LEFT_OUT = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
EMPTY = "99"


def mini_wheels(folder: Path) -> Path:
    """A folder in which pip finds mini-swe-agent and all that it declares; the test skips by name where it is not installed."""
    folder.mkdir()
    todo, made = [MINI], set[str]()
    while todo:
        name = canonicalize_name(todo.pop())
        if name in made:
            continue
        made.add(name)
        if name not in USED:
            empty(folder, name)
            continue
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed: pip install 'autorl-hpc[mini]'")
        again(folder, found)
        asked = [Requirement(line) for line in found.requires or ()]
        todo += [each.name for each in asked if each.marker is None or each.marker.evaluate({"extra": ""})]
    return folder


def again(folder: Path, found: metadata.Distribution) -> Path:
    """The wheel that an installed package came from, but for the order of its files."""
    files: dict[str, bytes] = {}
    for path in found.files or ():
        if path.parts[0] != ".." and "__pycache__" not in path.parts and path.name not in LEFT_OUT:
            files[path.as_posix()] = path.read_binary()
    (about,) = (text.decode() for path, text in files.items() if path.endswith(".dist-info/WHEEL"))
    tag = next(line.partition(": ")[2] for line in about.splitlines() if line.startswith("Tag: "))
    info = next(path for path in files if path.endswith(".dist-info/WHEEL")).partition("/")[0]
    return _write(folder, info, tag, files)


def empty(folder: Path, name: str) -> Path:
    """A wheel of nothing, of the version that constraints.txt wants."""
    pins = dict(
        line.split("#")[0].split("==") for line in (REPO / "constraints.txt").read_text().splitlines() if "==" in line
    )
    version = {canonicalize_name(key): pin.strip() for key, pin in pins.items()}.get(name, EMPTY)
    return plain(folder, name, version, {})


def plain(folder: Path, name: str, version: str, files: dict[str, str], needs: str = "") -> Path:
    """A pure-Python wheel, the same bytes each time; `files`: by place, `@` for its .dist-info."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + (f"Requires-Dist: {needs}\n" if needs else "")
    about = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    made = {**files, "@/METADATA": meta, "@/WHEEL": about}
    return _write(folder, info, "py3-none-any", {key.replace("@", info): text.encode() for key, text in made.items()})


def _write(folder: Path, info: str, tag: str, files: dict[str, bytes]) -> Path:
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    whole = {**files, f"{info}/RECORD": (record + f"{info}/RECORD,,\n").encode()}
    path = folder / f"{info.removesuffix('.dist-info')}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in whole.items():
            wheel.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
    return path
