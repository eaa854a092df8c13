"""One request on its way, and what becomes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from autorl_hpc.files.ledger import now_text
from autorl_hpc.gateway.asked import Asked
from autorl_hpc.gateway.usage import Meter


@dataclass
class Call:
    """Filled in on the way; the log's line is made of it at the end.

    Attributes:
        quiet: not logged.
        generates: its tokens count.
        hides_usage: a chat stream that is asked for its usage in the client's place.
        reached: it went out to the driver, as far as is known here.
        meter: reads the answer; None: there was none.
        unanswered: it was sent to a provider, and nothing came.
        whole: the answer came to its end.
        left: the client did not wait for it.
        bodies: request and answer, where they are kept.
    """

    dialect: str
    path: str
    at: str = field(default_factory=now_text)
    began: float = field(default_factory=time.monotonic)
    quiet: bool = False
    number: int = 0
    model: str | None = None
    generates: bool = False
    stream: bool = False
    hides_usage: bool = False
    wants: Asked | None = None
    status: int = 0
    request_bytes: int = 0
    answer_bytes: int = 0
    sent_at: float | None = None
    first_byte_s: float | None = None
    tries: list[str] = field(default_factory=list)
    reached: bool = False
    meter: Meter | None = None
    unanswered: bool = False
    whole: bool = False
    left: bool = False
    refused: str | None = None
    fault: str | None = None
    error: str | None = None
    bodies: tuple[bytes, bytearray] | None = None
