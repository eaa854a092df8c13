"""What the lint compares a submission with: the base model's config and tensors, read once from headers."""

from __future__ import annotations

import errno
import functools
import json
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autorl_hpc.errors import AutorlError, Refused
from autorl_hpc.files import reading
from autorl_hpc.files.checkpoint import EMBEDDING_NAMES, HEAD_NAME, TensorSpec, read_header, weight_files
from autorl_hpc.files.faults import again
from autorl_hpc.files.layout import Root
from autorl_hpc.files.store import verify_model
from autorl_hpc.files.tying import own_tensors
from autorl_hpc.records.run import RunRecord
from autorl_hpc.states import Fault


@dataclass(frozen=True)
class BaseModel:
    """The base model as headers show it.

    Attributes:
        shapes: shape of each tensor by name; of a tied head there is none, even if the file holds one.
        elements: number of values in all tensors.
        folder: where it is staged; None for a base that is known by its headers alone.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    content_hash: str
    elements: int
    folder: Path | None = None

    @property
    def tied(self) -> bool:
        """Whether the head shares the embedding: see files/tying.py."""
        return HEAD_NAME not in self.shapes

    @property
    def embedding(self) -> str | None:
        """Name of the embedding tensor, if it has a usual name."""
        return next((name for name in EMBEDDING_NAMES if name in self.shapes), None)

    @classmethod
    def read(cls, folder: Path, content_hash: str) -> BaseModel:
        """Reads a staged model's config and headers."""
        config = json.loads(reading.read_bytes(folder / "config.json"))
        shapes = {tensor.name: tensor.shape for tensor in own_tensors(folder)[0]}
        elements = 0
        for shape in shapes.values():
            count = 1
            for size in shape:
                count *= size
            elements += count
        return cls(config=config, shapes=shapes, content_hash=content_hash, elements=elements, folder=folder)

    def open_weights(self, stack: ExitStack) -> tuple[dict[str, int], list[TensorSpec]]:
        """Opens the staged weights: descriptors by file name, and all tensors. `stack` closes them.

        Raises:
            OSError: they can't be read: the cluster's fault, whatever the reason.
        """
        files: dict[str, int] = {}
        tensors: list[TensorSpec] = []
        try:
            if self.folder is None:
                raise FileNotFoundError
            for name in weight_files(self.folder):
                files[name] = fd = again(functools.partial(os.open, self.folder / name, os.O_RDONLY | os.O_CLOEXEC))
                stack.callback(os.close, fd)
                tensors.extend(read_header(fd, name))
        except (OSError, Refused):
            raise OSError(errno.EIO, "the staged base model can't be read") from None
        found = {tensor.name: tensor.shape for tensor in tensors if not (self.tied and tensor.name == HEAD_NAME)}
        if found != self.shapes:
            raise OSError(errno.EIO, "the staged base model is not the one that was launched with")
        return files, tensors


def staged_base_model(root: Root, record: RunRecord) -> BaseModel:
    """The base model of a run.

    Raises:
        AutorlError: it is not staged, was changed, or was staged anew with other weights.
    """
    manifest = verify_model(root, record.science.base_model)
    if manifest.content_hash != record.science.base_model_content_hash:
        raise AutorlError(
            f"base model {manifest.name} was staged anew with other weights since the launch",
            where=root.model(manifest.name),
            fault=Fault.CLUSTER,
            next_step="stage the weights that were launched with, or launch under another name",
        )
    return BaseModel.read(root.model(manifest.name), manifest.content_hash)
