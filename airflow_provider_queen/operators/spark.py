"""Submits Queen's Spark applications without showing the database's password anywhere."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.hooks.queen import QueenHook

if TYPE_CHECKING:
    from airflow.sdk import Context

DSN_VARIABLE = "QUEEN_DSN"


def parse_summary(line: str) -> dict[str, Any] | None:
    """Return the summary that an application prints as its last line, or nothing for any other line."""
    if not line.startswith('{"application"'):
        return None
    try:
        summary = json.loads(line)
    except json.JSONDecodeError:
        return None
    return summary if isinstance(summary, dict) else None


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What spark-submit needs to run on this Python environment: its own scripts first, and a Java."""
    path = os.pathsep.join([os.path.join(sys.prefix, "bin"), environ.get("PATH", os.defpath)])
    environment = {"PATH": path}
    if not environ.get("JAVA_HOME") and shutil.which("java", path=path) is None:
        from airflow_provider_queen.embedded.java import find_java_home

        environment["JAVA_HOME"] = str(find_java_home())
    return environment


class _SubmitHook(SparkSubmitHook):
    """Gives variables to the child process alone, and keeps the summary line that it prints.

    The hook's own ``env_vars`` would do on a local master, but on YARN and Kubernetes they become ``--conf``
    arguments: a password on the command line.
    """

    child_environment: dict[str, str]
    summary: dict[str, Any] | None

    @classmethod
    def adopt(cls, hook: SparkSubmitHook, environment: dict[str, str]) -> _SubmitHook:
        """Take over a hook as the operator built it, with its some thirty parameters."""
        adopted = cls.__new__(cls)
        adopted.__dict__.update(hook.__dict__)
        adopted.child_environment = environment
        adopted.summary = None
        return adopted

    def _build_spark_submit_command(self, application: str) -> list[str]:
        command = super()._build_spark_submit_command(application)
        # Building the command sets _env from env_vars; submit() reads it afterwards.
        self._env = {**self.child_environment, **(self._env or {})}
        return command

    def _process_spark_submit_log(self, itr: Iterable[Any]) -> None:
        super()._process_spark_submit_log(self._watch(itr))

    def _watch(self, lines: Iterable[Any]) -> Iterator[Any]:
        for line in lines:
            self.summary = parse_summary(line.strip()) or self.summary
            yield line


class QueenSparkOperator(SparkSubmitOperator):
    """Runs a Spark application against Queen's database and returns the summary that it prints.

    The database's connection is looked up on the worker, when the task runs, and reaches the driver in the
    environment of the ``spark-submit`` process: not in a rendered field, nor on the command line, nor in the
    log. In deploy mode ``cluster`` the driver runs elsewhere, where this environment does not reach: pass
    ``queen_conn_id=None`` and let the cluster give ``QUEEN_DSN`` to the driver (by a Kubernetes secret, say).

    Empty strings among ``application_args`` are left out, so that a template may render an option to nothing.

    :param queen_conn_id: connection of type ``queen`` or ``postgres`` (templated); None passes none on
    """

    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, "queen_conn_id")

    def __init__(self, *, queen_conn_id: str | None = "queen_default", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.queen_conn_id = queen_conn_id

    def execute(self, context: Context) -> dict[str, Any] | None:  # type: ignore[override]
        self.application_args = [argument for argument in self.application_args or [] if argument != ""]
        super().execute(context)
        return self._hook.summary if isinstance(self._hook, _SubmitHook) else None

    def _get_hook(self) -> SparkSubmitHook:
        self._check_spark_connection()
        hook = super()._get_hook()
        environment = child_environment(os.environ)
        if self.queen_conn_id is not None:
            if hook._connection["deploy_mode"] == "cluster":
                raise InvalidOptionError(
                    f"the Spark connection {self._conn_id!r} has deploy mode cluster, where {DSN_VARIABLE}"
                    " cannot reach the driver unseen: use client mode, or queen_conn_id=None and a secret"
                    " of the cluster"
                )
            environment[DSN_VARIABLE] = QueenHook(queen_conn_id=self.queen_conn_id).dsn
        return _SubmitHook.adopt(hook, environment)

    def _check_spark_connection(self) -> None:
        # The Spark provider takes YARN where the connection is missing, and fails much later about Hadoop.
        try:
            BaseHook.get_connection(self._conn_id)
        except AirflowNotFoundException:
            raise InvalidOptionError(
                f"there is no Spark connection {self._conn_id!r}: create one of type spark with the master"
                " as its host, for example local[2] or spark://host:7077"
            ) from None
