"""A consumer that can be stopped anywhere: it pops, processes, settles and pushes onward.

As a program (``python -m tests.engine.forwarder DSN SOURCE TARGET POINT``) it says when it has reached the
point, and stays there until it is killed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from airflow_provider_queen.client import QueenClient

# Between any two statements; and whether the messages are settled and pushed onward by then.
POINTS = {
    "before the pop": False,
    "in the pop's transaction": False,
    "after the pop": False,
    "after the settlement": False,
    "after the push": False,
    "after the commit": True,
}


def forward(client: QueenClient, source: str, target: str, at: Callable[[str, Any], None]) -> None:
    """Take messages from one queue to the other, each exactly once."""
    at("before the pop", None)
    with client.transaction() as tx:
        messages = tx.pop(source, lease_seconds=1000)
        at("in the pop's transaction", tx)
    at("after the pop", None)
    results = [{"payload": message.payload * 10} for message in messages]
    with client.transaction() as tx:
        tx.ack(messages)
        at("after the settlement", tx)
        tx.push(target, results)
        at("after the push", tx)
    at("after the commit", None)


def main() -> None:
    dsn, source, target, point = sys.argv[1:]

    def at(reached: str, _: Any) -> None:
        if reached == point:
            sys.stdout.write("there\n")
            sys.stdout.flush()
            sys.stdin.read()

    with QueenClient(dsn) as client:
        forward(client, source, target, at)


if __name__ == "__main__":
    main()
