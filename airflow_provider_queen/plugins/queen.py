"""What Queen adds to Airflow's UI and API. Found by the entry point ``airflow.plugins``."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin


class QueenPlugin(AirflowPlugin):
    """Registered as ``queen``."""

    name = "queen"
