"""Writes the whole task `deepsearchqa` from the official file: the hashes of its splits, and what is searched.

    python complete.py --from DIR --to ~/tasks --search bm25
    python complete.py --from DIR --to ~/tasks --search online --url 'https://HOST/search?q={query}&num={results}' \\
        --key-header X-API-KEY --key-file ~/.config/autorl-hpc/search.key --list organic --date 2026-11
    python complete.py --from DIR --to ~/tasks2 --search replay --url ... --list organic --date 2026-11

`replay` takes what `online` of the same address, fields and date recorded in this root, and needs neither network nor key; its
scores have the same recipe hash.

DIR holds DSQA-full.csv, for `bm25` corpus.jsonl too (see autorl_hpc/rollouts/search/backends.py), and judge_prompt_official.txt if it
is at hand. The same file and the same choice give the same task folder, so its hashes can be compared with others'.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
TEMPLATE = "task.template.yaml"
COPIED = ("description.md", "environment.py", "judge.txt", "prepare.py")
ONLINE = {
    "url": "search_url",
    "list": "search_list",
    "title": "search_title",
    "link": "search_link",
    "snippet": "search_snippet",
    "key_header": "search_key_header",
    "key_file": "search_key_file",
    "date": "search_date",
    "empty": "search_empty",
}


def complete(source: Path, target: Path, search: dict[str, Any]) -> Path:
    """Writes `target`/deepsearchqa; returns it.

    Args:
        search: options of the recipes that say what is searched.

    Raises:
        ValueError: the official file is not the pinned one, or the corpus is missing.
        OSError: something can't be read or written.
    """
    value = yaml.safe_load((HERE / TEMPLATE).read_text(encoding="utf-8"))
    folder = target / value["name"]
    if folder.exists():
        raise ValueError(f"{folder} is there already: remove it first, or choose another --to")
    for pinned in value["sources"]:
        path = source / pinned["file"]
        if path.is_file() and sha256_of(path) != pinned["sha256"]:
            raise ValueError(f"{path} has sha256 {sha256_of(path)}, the official file has {pinned['sha256']}")
        if not path.is_file() and not pinned.get("optional"):
            raise ValueError(f"{path} is missing; get it from {pinned['url']}")
    if search["search"] == "bm25" and not (source / "corpus.jsonl").is_file():
        raise ValueError(f"{source / 'corpus.jsonl'} is missing: bm25 needs documents to search in")
    with tempfile.TemporaryDirectory() as place:
        made = Path(place)
        _prepare(source, made)
        pins = {path.relative_to(made).as_posix(): sha256_of(path) for path in made.rglob("*") if path.is_file()}
        lines = {name: (made / name).read_bytes().count(b"\n") for name in pins}
    if "corpus.jsonl" in pins:
        value["sources"].append({"file": "corpus.jsonl", "sha256": pins["corpus.jsonl"]})
        value["vault_files"] = {"corpus.jsonl": pins["corpus.jsonl"]}
    if search["search"] == "bm25":
        search = {**search, "corpus": "corpus.jsonl", "corpus_sha256": pins["corpus.jsonl"]}
    value["train_files"] = {name: digest for name, digest in sorted(pins.items()) if name.startswith("train/")}
    value["splits"] = {
        split: {"n": lines[f"{split}/items.jsonl"], "sha256": pins[f"{split}/items.jsonl"]}
        for split in ("feedback", "report")
    }
    for recipe in value["recipes"]:
        recipe["options"] = {**recipe["options"], **search}
        if recipe["options"].get("judge_prompt") == "judge.txt":
            recipe["options"]["judge_prompt_sha256"] = pins["judge.txt"]
    folder.mkdir(parents=True)
    for name in COPIED:
        shutil.copyfile(HERE / name, folder / name)
    text = yaml.dump(value, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=120)
    (folder / "task.yaml").write_text(text, encoding="utf-8")
    return folder


class _Plain(yaml.SafeDumper):
    """Without references between recipes, so that each can be read by itself."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def sha256_of(path: Path) -> str:
    """In hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _prepare(source: Path, out: Path) -> None:
    spec = importlib.util.spec_from_file_location("deepsearchqa_prepare", HERE / "prepare.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.prepare(source, out)


def main() -> int:
    """The command; 2 where something is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, required=True, metavar="DIR")
    parser.add_argument("--to", type=Path, required=True, metavar="TASKS", help="a folder of task folders")
    parser.add_argument("--search", choices=("bm25", "online", "replay"), required=True)
    for name in ONLINE:
        parser.add_argument(f"--{name.replace('_', '-')}", help="with --search online or replay")
    given = parser.parse_args()
    search = {
        "search": given.search,
        **{key: getattr(given, name) for name, key in ONLINE.items() if getattr(given, name)},
    }
    try:
        if given.search != "bm25":
            from autorl_hpc.rollouts.search.backends import identity_of

            identity_of(search)
        folder = complete(given.source, given.to.expanduser(), search)
    except (ValueError, OSError) as error:
        print(f"complete: {error}", file=sys.stderr)
        return 2
    print(f"{folder} is whole. Next:\n  autorl-hpc stage deepsearchqa --tasks {folder.parent} --from {given.source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
