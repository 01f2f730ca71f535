"""Queues as OpenLineage datasets, where the OpenLineage provider is installed.

A queue is the dataset ``<database>.<queue>`` in the namespace ``queen://<host>:<port>``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from psycopg.conninfo import conninfo_to_dict

from airflow_provider_queen.hooks.queen import QueenHook

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage


class QueueLineage:
    """For operators: tells OpenLineage which queues a task reads and writes."""

    queen_conn_id: str

    def queues_read(self) -> Collection[str]:
        """The queues that the task takes messages from, as far as it is known by now."""
        return ()

    def queues_written(self) -> Collection[str]:
        """The queues that the task pushes to."""
        return ()

    def get_openlineage_facets_on_start(self) -> OperatorLineage | None:
        return queue_lineage(self.queen_conn_id, self.queues_read(), self.queues_written())

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage | None:
        return self.get_openlineage_facets_on_start()


def queue_lineage(
    queen_conn_id: str, inputs: Collection[str], outputs: Collection[str]
) -> OperatorLineage | None:
    """The lineage of a task; None where OpenLineage is not installed."""
    try:
        from airflow.providers.openlineage.extractors import OperatorLineage
        from openlineage.client.event_v2 import Dataset
    except ImportError:
        return None

    namespace, database = _place(QueenHook(queen_conn_id=queen_conn_id).dsn)

    def datasets(names: Collection[str]) -> list[Any]:
        return [Dataset(namespace=namespace, name=f"{database}.{name}") for name in sorted(names)]

    return OperatorLineage(inputs=datasets(inputs), outputs=datasets(outputs))


def _place(dsn: str) -> tuple[str, str]:
    parts = conninfo_to_dict(dsn)
    host = parts.get("host") or parts.get("hostaddr") or "localhost"
    return f"queen://{host}:{parts.get('port') or 5432}", str(parts.get("dbname") or parts.get("user") or "")
