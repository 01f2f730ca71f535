"""Figures of what tasks do, to wherever Airflow sends its own metrics.

Counters ``queen.pushed``, ``queen.duplicates``, ``queen.popped``, ``queen.completed``, ``queen.failed``,
``queen.forwarded``, ``queen.leases_lost``, ``queen.requeued``, ``queen.evicted`` and ``queen.deleted``; gauge
``queen.pending``. Tags name the queue (or namespace and task) and the consumer group where there is one.
"""

from __future__ import annotations

from collections.abc import Iterable

from airflow.sdk.observability import stats

from airflow_provider_queen.client import PushResult


def count(what: str, amount: int, **tags: str | None) -> None:
    """Add to the counter ``queen.<what>``; nothing is sent for zero."""
    if amount:
        stats.incr(f"queen.{what}", amount, tags=_given(tags))


def gauge(what: str, value: float, **tags: str | None) -> None:
    """Set the gauge ``queen.<what>``."""
    stats.gauge(f"queen.{what}", value, tags=_given(tags))


def count_pushed(queue_name: str, results: Iterable[PushResult]) -> None:
    """Count what a push stored, and what had been stored before."""
    statuses = [result.status for result in results]
    count("pushed", statuses.count("queued"), queue_name=queue_name)
    count("duplicates", statuses.count("duplicate"), queue_name=queue_name)


def _given(tags: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in tags.items() if value is not None}
