"""From a task to the Queen page in Airflow's UI."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode, urljoin

from airflow.sdk import BaseOperatorLink, conf

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

# Where Airflow shows the plugin's page, whose url_route is "queen".
PAGE = "plugin/queen"


class QueenLink(BaseOperatorLink):
    """To the queue that the task works on. Airflow computes it on the worker, when the task has ended."""

    name = "Queen"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey) -> str:
        return page_url(
            queue_name=getattr(operator, "queue_name", None),
            namespace=getattr(operator, "namespace", None),
            consumer_group=getattr(operator, "consumer_group", None),
            queen_conn_id=getattr(operator, "queen_conn_id", None),
        )


def page_url(**selection: str | None) -> str:
    """The address of the Queen page, showing what is selected; where the page is absent, it leads nowhere."""
    base = conf.get("api", "base_url", fallback="/")
    url = urljoin(base.rstrip("/") + "/", PAGE)
    given = {name: value for name, value in selection.items() if isinstance(value, str) and value}
    return f"{url}?{urlencode(given)}" if given else url
