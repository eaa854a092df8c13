"""Read scalars from TensorBoard's event files: TFRecords (length, its CRC, data, its CRC) of protocol buffers of type Event.

Source: tensorflow/core/util/event.proto and summary.proto. Event.step is field 2, Event.summary 5, Summary.value 1,
Value.tag 1, Value.simple_value 2 (float32), Value.tensor 8 with TensorProto.float_val 5. CRCs are not checked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

MAX_RECORD_BYTES = 64 * 2**10
"""Records of scalars have about fifty bytes; larger ones are histograms, images and graphs."""

HEADER = struct.Struct("<QI")
CRC_BYTES = 4
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class DamagedEvents(ValueError):
    """The bytes are no event file from here on."""


def records(data: bytes, available: int) -> tuple[list[bytes], int]:
    """Return the whole records at the beginning of `data`, and the bytes they take; after them comes an incomplete record. A
    large record is skipped; it may end beyond `data`, within the `available` bytes of the file.

    Raises:
        DamagedEvents: a length that no record has.
    """
    found: list[bytes] = []
    at = 0
    while at + HEADER.size <= len(data):
        length, _ = HEADER.unpack_from(data, at)
        if length > 2**31:
            raise DamagedEvents(f"a record of {length} bytes")
        end = at + HEADER.size + length + CRC_BYTES
        if end > available:
            break
        if length <= MAX_RECORD_BYTES:
            if end > len(data):
                break
            found.append(data[at + HEADER.size : end - CRC_BYTES])
        at = end
    return found, at


def scalars(record: bytes) -> tuple[int, dict[str, float]]:
    """Return (step, values by tag) of one Event; no values for events of other kinds.

    Raises:
        DamagedEvents: it is not a protocol buffer.
    """
    step, found = 0, {}
    for field, kind, value in _fields(record):
        if field == 2 and kind == VARINT:
            step = int(value) if int(value) < 2**63 else 0
        elif field == 5 and kind == BYTES:
            for inner, inner_kind, scalar in _fields(bytes(value)):
                if inner == 1 and inner_kind == BYTES:
                    tag, number = _scalar(bytes(scalar))
                    if tag and number is not None:
                        found[tag] = number
    return step, found


def _scalar(data: bytes) -> tuple[str, float | None]:
    tag, number = "", None
    for field, kind, value in _fields(data):
        if field == 1 and kind == BYTES:
            tag = bytes(value).decode("utf-8", "replace")
        elif field == 2 and kind == FIXED32:
            number = struct.unpack("<f", bytes(value))[0]
        elif field == 8 and kind == BYTES:
            number = _first_float(bytes(value))
    return tag, number


def _first_float(tensor: bytes) -> float | None:
    for field, kind, value in _fields(tensor):
        if field == 5 and kind in (FIXED32, BYTES) and len(bytes(value)) >= 4:
            return float(struct.unpack_from("<f", bytes(value))[0])
    return None


def _fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == VARINT:
            number, at = _varint(data, at)
            yield key >> 3, kind, number
            continue
        if kind == BYTES:
            length, at = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            length = 8 if kind == FIXED64 else 4
        else:
            raise DamagedEvents(f"wire type {kind}")
        if at + length > len(data):
            raise DamagedEvents("a field that reaches beyond its record")
        yield key >> 3, kind, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
    raise DamagedEvents("a number without an end")
