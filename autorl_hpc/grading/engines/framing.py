"""Frames between the daemon and an engine's worker: a JSON object and a block of bytes, each with its length before it.

No pickle. Token ids go in the block, four bytes each in the machine's order, since both ends are one machine. Standard library only.
"""

from __future__ import annotations

import json
import socket
import struct
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

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
