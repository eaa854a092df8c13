"""Protocol between the daemon and vLLM workers: frames, prompt routing, workers per GPU and KV cache sizes.

A frame is a JSON object and a block of bytes, each preceded by its length; no pickle. Token ids are in the block, four bytes
each in native byte order. Standard library only, because the worker imports this too.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from autorl_hpc.rollouts.engine import CONVERSATION

LENGTHS = struct.Struct("<II")
MAX_FRAME_BYTES = 1 << 30
"""Limit for either part; a larger one is not our frame. 10,000 prompts of 8,000 tokens take 320 MB."""

TOKEN_CODE = "i"  # C's int: four bytes on every platform of torch


class Frame(NamedTuple):
    """One message."""

    head: dict[str, Any]
    block: bytes = b""


class BadFrame(Exception):
    """The other end sent something that is not a frame."""


def send(sock: socket.socket, head: dict[str, Any], block: bytes = b"") -> None:
    """Send one frame. Not thread-safe. Raises OSError: the other end is gone."""
    text = json.dumps(head, separators=(",", ":")).encode()
    sock.sendall(LENGTHS.pack(len(text), len(block)) + text)
    if block:
        sock.sendall(block)


def receive(sock: socket.socket) -> Frame | None:
    """Wait for the next frame; None if the other end is gone. Raises BadFrame: the data are not a frame."""
    lengths = _exactly(sock, LENGTHS.size)
    if lengths is None:
        return None
    text_size, block_size = LENGTHS.unpack(lengths)
    if max(text_size, block_size) > MAX_FRAME_BYTES:
        raise BadFrame(f"a frame of {text_size} and {block_size} bytes")
    text, block = _exactly(sock, text_size), _exactly(sock, block_size)
    if text is None or block is None:
        return None
    try:
        head = json.loads(bytes(text))
    except (ValueError, RecursionError):
        raise BadFrame("a frame that is not JSON") from None
    if not isinstance(head, dict):
        raise BadFrame("a frame that is not an object")
    return Frame(head, bytes(block))


def _exactly(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        try:
            got = sock.recv_into(view)
        except ConnectionResetError:
            return None
        if got == 0:
            return None
        view = view[got:]
    return data


def pack_tokens(rows: Iterable[Sequence[int]]) -> tuple[list[int], bytes]:
    """Pack rows of token ids; return their lengths and one block."""
    block = array(TOKEN_CODE)
    lengths = []
    for row in rows:
        block.extend(row)
        lengths.append(len(row))
    return lengths, block.tobytes()


def unpack_tokens(lengths: Sequence[int], block: bytes) -> list[list[int]]:
    """Unpack the rows of `pack_tokens`. Raises BadFrame: the lengths don't match the block."""
    tokens = array(TOKEN_CODE)
    if len(block) % tokens.itemsize:
        raise BadFrame("a block of token ids with a broken end")
    tokens.frombytes(block)
    rows, position = [], 0
    for length in lengths:
        rows.append(tokens[position : position + length].tolist())
        position += length
    if position != len(tokens):
        raise BadFrame("token ids that don't fit their lengths")
    return rows


# --- routing of prompts to workers

MOVES_ABOVE = 8
"""A conversation moves if its worker has over twice the prompts of the least busy one, and at least this many more."""


class Routes:
    """Routes the prompts of one stream. A new conversation goes to the worker with the fewest pending tokens and stays there
    to reuse its prefix cache. Not thread-safe."""

    def __init__(self, workers: int, answer_tokens: int) -> None:
        self._answer_tokens = answer_tokens
        self._tokens = [0] * workers
        self._asked: list[dict[int, int]] = [{} for _ in range(workers)]  # per worker: pending tokens by key
        self._homes: dict[int, tuple[int, int]] = {}  # per conversation: its worker, and the tokens cached there

    def give(self, key: int, length: int) -> int:
        """Return the worker for a prompt of `length` tokens and count the prompt as pending until `done`."""
        conversation = key // CONVERSATION
        least = self._tokens.index(min(self._tokens))
        number, known = self._homes.get(conversation, (least, 0))
        if len(self._asked[number]) > 2 * len(self._asked[least]) + MOVES_ABOVE:
            number, known = least, 0
        cost = max(0, length - known) + self._answer_tokens
        self._homes[conversation] = (number, length)
        self._asked[number][key] = cost
        self._tokens[number] += cost
        return number

    def done(self, number: int, key: int) -> None:
        """Note that a worker answered a prompt."""
        self._tokens[number] -= self._asked[number].pop(key, 0)

    def busy(self) -> list[int]:
        """Return the workers that have pending prompts."""
        return [number for number, asked in enumerate(self._asked) if asked]


# --- workers per GPU
# With a small model, vLLM's single Python thread is the bottleneck and the GPU idles.

SIZES = ((500_000_000, 4), (1_500_000_000, 2))  # (parameter limit, workers on one GPU); larger models get one worker
CORES_EACH = 3  # Cores per worker: its main thread, its helper threads, and a share for the daemon and the environments

SEQUENCES = 256
"""Prompts that each of several workers answers at a time; together at most vLLM's default on a large GPU."""

STEP_TOKENS = 8192
"""Tokens that each of several workers computes in a step. The last layer's memory grows with this number."""

FIXED_BYTES = 2 << 30  # Memory of each worker for CUDA's context and libraries, CUDA graphs, and some reserve

LOGIT_BYTES = 48
"""Bytes per sequence and vocabulary entry in the sampler: logits, sorted logits with indices, sums and samples."""

Shapes = Mapping[str, Sequence[int]]


def parameters(shapes: Shapes) -> int:
    """Count the parameters of a model from its tensors' shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


def fitting(shapes: Shapes, cores: int, groups: int) -> int:
    """Return how many workers suit one of `groups` GPUs, from the model's size and the cores that all workers share."""
    size = parameters(shapes)
    wanted = next((count for limit, count in SIZES if size < limit), 1)
    return max(1, min(wanted, cores // (CORES_EACH * groups)))


def cache_bytes(share: int, shapes: Shapes, item: int) -> int:
    """Return the bytes for the KV cache of a worker that may use `share` bytes of a GPU; not positive if there is no room.

    This is what weights, sampler and activations leave. vLLM's own measurement at startup is not used, because it would count
    the memory use of other workers on the GPU. `item`: bytes of one number.
    """
    matrices = [shape for shape in shapes.values() if len(shape) == 2]
    rows, hidden = max(((shape[0], shape[1]) for shape in matrices), default=(0, 0))  # the embedding
    widest = max((shape[0] for shape in matrices if shape[0] != rows), default=hidden)
    layers = STEP_TOKENS * (8 * hidden + 4 * widest) * item
    return share - parameters(shapes) * item - SEQUENCES * rows * LOGIT_BYTES - layers - FIXED_BYTES
