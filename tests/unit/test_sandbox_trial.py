"""What a sandbox's trial takes for an answer."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from autorl_hpc.sandbox.trial import TIMEOUT_S, answered, tried


@pytest.mark.slow
def test_a_way_out_that_answers_late_works_and_one_that_is_closed_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_late() -> None:
            client, _ = listener.accept()
            with client:
                time.sleep(2 * TIMEOUT_S)
                client.sendall(client.recv(5))

        thread = threading.Thread(target=answer_late)
        thread.start()
        assert tried(lambda: answered(listener.getsockname()[1])) is True
        thread.join()

        def close() -> None:
            listener.accept()[0].close()

        thread = threading.Thread(target=close)
        thread.start()
        assert tried(lambda: answered(listener.getsockname()[1])) is not True
        thread.join()
