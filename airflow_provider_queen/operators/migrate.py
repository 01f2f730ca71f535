"""Brings the schema ``queen`` to a version."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_provider_queen.client import schema
from airflow_provider_queen.hooks.queen import QueenHook

if TYPE_CHECKING:
    from airflow.sdk import Context

SQL_XCOM_KEY = "sql"


class QueenMigrateOperator(BaseOperator):
    """Migrates the schema ``queen``, up or down, in one transaction; does nothing where it is there already.

    Returns ``from``, ``to`` (``None`` is base: no schema), ``applied`` (the revisions that ran; on the way
    down, those that were undone) and ``changed`` (also where only views and functions were applied again).

    :param target: ``head``, a revision or the beginning of its name, a step such as ``-1``, or ``base``,
        which deletes every queue and message (templated)
    :param dry_run: change nothing; return what a run would return, log the SQL that it would execute, and
        keep it as the XCom ``sql``
    :param queen_conn_id: connection of type ``queen`` or ``postgres`` (templated)
    """

    template_fields: Sequence[str] = ("target", "queen_conn_id")

    def __init__(
        self,
        *,
        target: str = "head",
        dry_run: bool = False,
        queen_conn_id: str = QueenHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.target = target
        self.changes_nothing = dry_run  # `dry_run` is a method of BaseOperator
        self.queen_conn_id = queen_conn_id

    @cached_property
    def hook(self) -> QueenHook:
        return QueenHook(queen_conn_id=self.queen_conn_id)

    def execute(self, context: Context) -> dict[str, Any]:
        report = self._plan(context) if self.changes_nothing else self.hook.migrate(self.target)
        here, there = report.from_version or "base", report.to_version or "base"
        if not report.changed:
            self.log.info("Nothing to do: the schema queen is up to date at %s", there)
        else:
            self.log.info(
                "%s from %s to %s: revisions %s; %d files of views and functions",
                "Would migrate" if self.changes_nothing else "Migrated",
                here,
                there,
                ", ".join(report.applied) or "none",
                len(report.reapplied),
            )
        return {
            "from": report.from_version,
            "to": report.to_version,
            "applied": report.applied,
            "changed": report.changed,
        }

    def _plan(self, context: Context) -> schema.MigrationReport:
        plan = schema.plan(self.hook.dsn, self.target)
        self.log.info("The SQL, also in the XCom %r:\n%s", SQL_XCOM_KEY, plan.sql)
        context["ti"].xcom_push(key=SQL_XCOM_KEY, value=plan.sql)
        return plan.report
