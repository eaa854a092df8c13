"""The agent's workspace. It belongs to the agent, so the supervisor touches it by directory descriptors alone and follows
no link in it: whatever the agent puts in the place of `results/`, nothing outside the workspace is ever written."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Any

from autorl_hpc.errors import Refused
from autorl_hpc.files.below import DIR_FLAGS
from autorl_hpc.files.faults import again, is_cluster_error
from autorl_hpc.records.canonical import readable_json
from autorl_hpc.supervise.folders import FILE_FLAGS

PRIVATE_FOLDERS = (".home", ".tmp", ".agent")


class Workspace:
    """An open workspace, by descriptor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, DIR_FLAGS)

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self._fd)

    def open_folder(self, name: str) -> int | None:
        """A descriptor of a first-level folder, made again if the agent removed it; None if something else is there.

        Raises:
            OSError: the file system failed: nothing is said about what is there.
        """

        def look() -> int:
            return os.open(name, DIR_FLAGS, dir_fd=self._fd)

        try:
            try:
                return again(look)
            except FileNotFoundError:
                os.mkdir(name, 0o755, dir_fd=self._fd)
                return again(look)
        except OSError as error:
            if is_cluster_error(error):
                raise
            return None

    def open_model_folder(self, given: str) -> tuple[int, str]:
        """Opens the folder that a manifest names, part by part, following no link; (descriptor, relative path).

        Raises:
            Refused: the path leaves the workspace, meets a link, or is no folder.
            OSError: the file system failed.
        """
        parts = self._relative_parts(given)
        fd = os.dup(self._fd)
        done: list[str] = []
        for part in parts:
            try:
                following = os.open(part, DIR_FLAGS, dir_fd=fd)
            except OSError as error:
                here = _told("/".join([*done, part]), given)
                os.close(fd)
                if is_cluster_error(error):
                    raise
                if error.errno == errno.ELOOP or _is_link(self._fd, [*done, part]):
                    raise Refused(
                        "symlink", f"model_path: {here} is a symbolic link", "submit a real folder of the workspace"
                    ) from None
                if error.errno == errno.ENOTDIR:
                    raise Refused(
                        "not_a_folder", f"model_path: {here} is no folder", "give the folder, not a file in it"
                    ) from None
                raise Refused(
                    "no_such_folder",
                    f"model_path: {here}: {error.strerror}",
                    "check the path; it is relative to the workspace",
                ) from None
            os.close(fd)
            fd = following
            done.append(part)
        return fd, "/".join(done)

    def _relative_parts(self, given: str) -> list[str]:
        text = given
        if text.startswith("/"):
            for prefix in {str(self.path), str(self.path.resolve())}:
                if text == prefix or text.startswith(prefix + "/"):
                    text = text[len(prefix) :].lstrip("/")
                    break
            else:
                raise Refused(
                    "path_outside",
                    "model_path is an absolute path outside the workspace",
                    "give a folder of the workspace, such as output/v1",
                )
        parts = [part for part in text.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise Refused("path_outside", "model_path holds `..`", "give a folder of the workspace, such as output/v1")
        if not parts:
            raise Refused(
                "path_outside",
                "model_path is the workspace itself",
                "give a folder of the workspace, such as output/v1",
            )
        if parts[0] in ("submissions", "results", *PRIVATE_FOLDERS):
            raise Refused("path_outside", f"model_path lies in {parts[0]}/", "save checkpoints under output/")
        return parts

    def write_text(self, name: str, text: str) -> bool:
        """Writes a text file whole or not at all into the workspace; False if it can't."""
        return self._write(None, name, text.encode("utf-8", "backslashreplace"))

    def write(self, folder: str | None, name: str, value: Any) -> bool:
        """Writes a JSON file whole or not at all into a first-level folder (or the workspace); False if it can't."""
        return self._write(folder, name, readable_json(value))

    def _write(self, folder: str | None, name: str, content: bytes) -> bool:
        data = memoryview(content)
        try:
            fd = os.dup(self._fd) if folder is None else self.open_folder(folder)
        except OSError:
            return False
        if fd is None:
            return False
        # Not synced: an attempt that follows a lost node tells everything again.
        temporary = f".tmp-{secrets.token_hex(8)}"
        try:
            out = os.open(temporary, FILE_FLAGS, 0o644, dir_fd=fd)
            try:
                while data:
                    data = data[os.write(out, data) :]
            finally:
                os.close(out)
            os.rename(temporary, name, src_dir_fd=fd, dst_dir_fd=fd)
            return True
        except OSError:
            try:
                os.unlink(temporary, dir_fd=fd)
            except OSError:
                pass
            return False
        finally:
            os.close(fd)


def _is_link(root_fd: int, parts: list[str]) -> bool:
    try:
        return stat.S_ISLNK(os.stat("/".join(parts), dir_fd=root_fd, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _told(here: str, given: str) -> str:
    """The part of a path that failed, with the whole of it where that is another: in odd names a `/` is easily overlooked."""
    plain = given.rstrip("/").removeprefix("./")
    return here[:200] if here == plain else f"{given[:200]}: {here[:200]}"
