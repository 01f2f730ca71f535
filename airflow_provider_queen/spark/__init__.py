"""Spark on Queen: the ``queen`` data source and the job library. Imports no Airflow."""

from __future__ import annotations

from airflow_provider_queen.spark.connection import ConnectionInfo, Keys
from airflow_provider_queen.spark.datasource import QueenDataSource, register

__all__ = ["ConnectionInfo", "Keys", "QueenDataSource", "register"]
