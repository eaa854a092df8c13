"""Read scalars from TensorBoard's event files: TFRecords (length, its CRC, data, its CRC) of protocol buffers of type Event.

Source: tensorflow/core/util/event.proto and summary.proto. Event.step is field 2, Event.summary 5, Summary.value 1,
Value.tag 1, Value.simple_value 2 (float32), Value.tensor 8 with TensorProto.float_val 5. CRCs are not checked.
"""

from __future__ import annotations

import struct
from collections import defaultdict

MAX_RECORD_BYTES = 64 * 2**10
"""Records of scalars have about fifty bytes; larger ones are histograms, images and graphs."""

HEADER = struct.Struct("<QI")
CRC_BYTES = 4
VARINT, BYTES = 0, 2
LENGTHS = {1: 8, 5: 4}
"""Of the wire types fixed64 and fixed32."""

FLOAT = struct.Struct("<f")


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
    event, found = _fields(record), dict[str, float]()
    steps = [step for step in event[2] if isinstance(step, int) and step < 2**63]
    values = [_fields(value) for summary in _bytes(event[5]) for value in _bytes(_fields(summary)[1])]
    for value in values:
        tags, numbers = _bytes(value[1]), _bytes(value[2])
        for tensor in _bytes(value[8]):
            numbers += _bytes(_fields(tensor)[5])
        numbers = [number for number in numbers if len(number) >= FLOAT.size]
        if tags and tags[-1] and numbers:
            found[tags[-1].decode("utf-8", "replace")] = float(FLOAT.unpack_from(numbers[0])[0])
    return (steps[-1] if steps else 0), found


def _bytes(values: list[int | bytes]) -> list[bytes]:
    return [value for value in values if isinstance(value, bytes)]


def _fields(data: bytes) -> defaultdict[int, list[int | bytes]]:
    """Return the values of a protocol buffer by the number of their field."""
    found: defaultdict[int, list[int | bytes]] = defaultdict(list)
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == VARINT:
            number, at = _varint(data, at)
            found[key >> 3].append(number)
            continue
        length = LENGTHS.get(kind, len(data))
        if kind == BYTES:
            length, at = _varint(data, at)
        if at + length > len(data):
            raise DamagedEvents("a field that reaches beyond its record, or of an unknown type")
        found[key >> 3].append(data[at : at + length])
        at += length
    return found


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
