"""What a sandbox that can only allow makes of a plan that hides: no link may lead in again."""

from __future__ import annotations

from pathlib import Path

from autorl_hpc.sandbox.sandbox_plan import carved


def test_links_to_what_is_hidden_or_holds_it_are_left_out(tmp_path: Path) -> None:
    programs = tmp_path / "usr" / "bin"
    programs.mkdir(parents=True)
    for name in ("sbatch", "sh"):
        (programs / name).touch()
    (programs / "X11").symlink_to(".")  # as on Debian
    (programs / "batch").symlink_to("sbatch")
    (programs / "dash").symlink_to("sh")
    (tmp_path / "usr" / "top").symlink_to(tmp_path)
    (tmp_path / "usr" / "lib").mkdir()
    left = carved([str(tmp_path / "usr")], [str(programs / "sbatch")])
    assert left == [str(tmp_path / "usr" / name) for name in ("bin/dash", "bin/sh", "lib")]


def test_what_lies_in_a_hidden_folder_stays_if_it_was_named(tmp_path: Path) -> None:
    inner = tmp_path / "home" / "python"
    inner.mkdir(parents=True)
    assert carved([str(inner)], [str(tmp_path / "home")]) == [str(inner)]
    assert carved([str(tmp_path / "home")], [str(tmp_path / "home")]) == []
