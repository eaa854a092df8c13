"""A folder that may belong to an agent already, written to by descriptor: no link in it is ever followed."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from pathlib import Path
from types import TracebackType

from autorl_hpc.files.below import DIR_FLAGS
from autorl_hpc.files.faults import again, as_lost_answer

OWNERS = stat.S_IRWXU
FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Folder:
    """An open folder."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.fd)

    @classmethod
    def open(cls, path: Path) -> Folder:
        """The folder at `path`, whose last part must be no link."""
        return cls(again(lambda: os.open(path, DIR_FLAGS)))

    def folder(self, name: str) -> Folder:
        """The folder `name` in it, made if it is not there. A link or a file in its place is removed; one that its owner closed
        is opened.

        Raises:
            OSError: it can be neither opened nor made.
        """
        mode = self._mode(name) if self.stands(name) else 0
        if stat.S_ISDIR(mode):
            if mode & OWNERS != OWNERS:
                self._open_up(name)
        else:
            self._clear(name)
            try:
                again(lambda: os.mkdir(name, 0o755, dir_fd=self.fd))
            except FileExistsError:
                pass
        return Folder(again(lambda: os.open(name, DIR_FLAGS, dir_fd=self.fd)))

    def _open_up(self, name: str) -> None:
        """Gives a folder's owner all rights again; by descriptor, so that no link that comes in its place is followed."""
        fd = again(lambda: os.open(name, DIR_FLAGS | os.O_PATH, dir_fd=self.fd))
        try:
            os.chmod(f"/proc/self/fd/{fd}", stat.S_IMODE(os.fstat(fd).st_mode) | OWNERS)
        finally:
            os.close(fd)

    def stands(self, name: str) -> bool:
        """Whether there is something of that name that is no link."""
        try:
            return not stat.S_ISLNK(self._mode(name))
        except FileNotFoundError:
            return False

    def lay_file(self, name: str, source: Path | bytes, mode: int = 0o644) -> None:
        """Lays a file, whole or not at all, unless something stands there. A link in its place is replaced."""
        again(lambda: self._lay_file(name, source, mode))

    def _lay_file(self, name: str, source: Path | bytes, mode: int) -> None:
        if self.stands(name):
            return
        temporary = f".tmp-{secrets.token_hex(8)}"
        try:
            with os.fdopen(os.open(temporary, FILE_FLAGS, 0o644, dir_fd=self.fd), "wb") as out:
                if isinstance(source, bytes):
                    out.write(source)
                else:
                    with open(source, "rb") as data:
                        shutil.copyfileobj(data, out, 4 * 1024 * 1024)
                os.fchmod(out.fileno(), mode)
            self._rename(temporary, name)
        except OSError as error:
            try:
                os.unlink(temporary, dir_fd=self.fd)
            except OSError:
                pass
            if isinstance(error, FileExistsError):
                raise as_lost_answer(error) from error
            raise

    def lay_tree(self, source: Path, skip: frozenset[str]) -> None:
        """Lays the files below `source` that don't stand yet; names in `skip` and compiled Python are left out."""
        for name in sorted(again(lambda: os.listdir(source))):
            if name in skip or name == "__pycache__" or name.endswith(".pyc"):
                continue
            path = source / name
            mode = again(path.stat).st_mode
            if stat.S_ISDIR(mode):
                with self.folder(name) as inner:
                    inner.lay_tree(path, skip)
            else:
                execute = mode & 0o111  # the store's files are read-only, the agent's copies are not
                self.lay_file(name, path, 0o644 | execute)

    def lay_link(self, name: str, source: Path) -> None:
        """Lays a link to `source`, unless a folder with something in it stands there."""
        if self.stands(name) and not self._is_empty(name):
            return
        temporary = f".tmp-{secrets.token_hex(8)}"
        again(lambda: os.symlink(source, temporary, dir_fd=self.fd))
        self._clear(name)
        again(lambda: self._rename(temporary, name))

    def lay_whole(self, name: str, source: Path, skip: frozenset[str]) -> None:
        """Lays a copy of the folder `source`, whole or not at all, unless a folder with something in it stands there."""
        if self.stands(name) and not self._is_empty(name):
            return
        temporary = f".tmp-{secrets.token_hex(8)}"
        with self.folder(temporary) as fresh:
            fresh.lay_tree(source, skip)
        self._clear(name)
        again(lambda: self._rename(temporary, name))

    def _rename(self, temporary: str, name: str) -> None:
        """The listing tells whether an error is only the lost answer to a rename that was made."""
        try:
            os.rename(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError:
            if again(lambda: temporary in os.listdir(self.fd)):
                raise

    def _mode(self, name: str) -> int:
        return again(lambda: os.stat(name, dir_fd=self.fd, follow_symlinks=False)).st_mode

    def _is_empty(self, name: str) -> bool:
        """Whether it is a folder with nothing in it: a place where a sandbox mounted something."""
        try:
            fd = os.open(name, DIR_FLAGS, dir_fd=self.fd)
        except OSError:
            return False
        try:
            return not again(lambda: os.listdir(fd))
        finally:
            os.close(fd)

    def _clear(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self.fd)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError):
            os.rmdir(name, dir_fd=self.fd)
