"""Frames between the daemon and an engine's worker: a JSON object and a block of bytes, each with its length before it.

No pickle. Token ids go in the block, four bytes each in the machine's order, since both ends are one machine. Standard library only.
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
"""Of either part: more is no frame of ours. 10,000 prompts of 8,000 tokens have 320 MB."""

TOKEN_CODE = "i"  # C's int: four bytes wherever torch runs


class Frame(NamedTuple):
    """One message."""

    head: dict[str, Any]
    block: bytes = b""


class BadFrame(Exception):
    """The other end sent what is no frame."""


def send(sock: socket.socket, head: dict[str, Any], block: bytes = b"") -> None:
    """Sends one frame. One thread at a time.

    Raises:
        OSError: the other end is gone.
    """
    text = json.dumps(head, separators=(",", ":")).encode()
    sock.sendall(LENGTHS.pack(len(text), len(block)) + text)
    if block:
        sock.sendall(block)


def receive(sock: socket.socket) -> Frame | None:
    """The next frame, waiting for it; None when the other end is gone.

    Raises:
        BadFrame: what came is none.
    """
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
        raise BadFrame("a frame that is no JSON") from None
    if not isinstance(head, dict):
        raise BadFrame("a frame that is no object")
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
    """Rows of token ids as their lengths and one block."""
    block = array(TOKEN_CODE)
    lengths = []
    for row in rows:
        block.extend(row)
        lengths.append(len(row))
    return lengths, block.tobytes()


def unpack_tokens(lengths: Sequence[int], block: bytes) -> list[list[int]]:
    """The rows again.

    Raises:
        BadFrame: the lengths don't fit the block.
    """
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


# Which of an engine's workers answers which prompt of a stream.

MOVES_ABOVE = 8
"""A conversation leaves its worker where that has more than twice the prompts of the one with least to do, and so many more."""


class Routes:
    """Of one stream. A new conversation goes to the worker with the fewest tokens to do, and stays there for its prefix cache.

    Not for several threads at once.
    """

    def __init__(self, workers: int, answer_tokens: int) -> None:
        """
        Args:
            answer_tokens: an answer's at most.
        """
        self._answer_tokens = answer_tokens
        self._tokens = [0] * workers
        self._asked: list[dict[int, int]] = [{} for _ in range(workers)]  # keys and tokens to do
        self._homes: dict[int, tuple[int, int]] = {}  # by conversation: a worker, and the tokens that it knows

    def give(self, key: int, length: int) -> int:
        """The worker for a prompt of `length` tokens; it counts as busy with it until `done`."""
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
        """A worker answered."""
        self._tokens[number] -= self._asked[number].pop(key, 0)

    def busy(self) -> list[int]:
        """The workers that have something to answer."""
        return [number for number, asked in enumerate(self._asked) if asked]


# Several workers on one GPU: how many, and how much of its memory each may take.
#
# With a small model vLLM's own Python, one thread of a worker, is the bound, and the GPU waits. Standard library only: the worker reads
# this too.

SIZES = ((500_000_000, 4), (1_500_000_000, 2))
"""Workers on one GPU for models with fewer parameters than that; one for larger ones."""

CORES_EACH = 3
"""A worker's thread, what it starts beside it, and the daemon's and the environments' share."""

SEQUENCES = 256
"""That one of several workers answers at a time: together they have as many as vLLM's default on a large GPU, or fewer."""

STEP_TOKENS = 8192
"""That one of several workers computes in a step. A last layer's inputs and outputs take memory by this number."""

FIXED_BYTES = 2 << 30
"""Of each worker: CUDA's context and libraries, recorded graphs, and room to spare."""

LOGIT_BYTES = 48
"""Of a sequence and word of the vocabulary: logits, sorted with their places, summed and drawn from."""

Shapes = Mapping[str, Sequence[int]]


def parameters(shapes: Shapes) -> int:
    """Of a model, from its tensors' shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


def fitting(shapes: Shapes, cores: int, groups: int) -> int:
    """How many workers suit a GPU, by the model's size and the cores that all workers of the daemon share.

    Args:
        groups: GPUs that have workers.
    """
    size = parameters(shapes)
    wanted = next((count for limit, count in SIZES if size < limit), 1)
    return max(1, min(wanted, cores // (CORES_EACH * groups)))


def cache_bytes(share: int, shapes: Shapes, item: int) -> int:
    """Bytes of keys and values for a worker that has `share` bytes of a GPU: what weights, sampler and layers leave. Not positive
    where there is no room.

    vLLM itself would measure its needs while it starts, and takes what its neighbours on the GPU do meanwhile for its own.

    Args:
        item: bytes of a number.
    """
    matrices = [shape for shape in shapes.values() if len(shape) == 2]
    rows, hidden = max(((shape[0], shape[1]) for shape in matrices), default=(0, 0))  # the embedding
    widest = max((shape[0] for shape in matrices if shape[0] != rows), default=hidden)
    layers = STEP_TOKENS * (8 * hidden + 4 * widest) * item
    return share - parameters(shapes) * item - SEQUENCES * rows * LOGIT_BYTES - layers - FIXED_BYTES
