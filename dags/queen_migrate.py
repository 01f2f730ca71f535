"""Brings the schema ``queen`` to a version: preflight, dry run, migration, verification, and the end of v2.

On a database that is up to date it changes nothing and says so. The SQL of the dry run is the XCom ``sql`` of
its task. Where a migration fails, the database is as it was before; one from Queen v2 compares both sides
before it commits. v2's tables are kept until a person approves that they go. ``rollback`` leads back to v2,
with what was pushed and consumed meanwhile.

``QUEEN_CONN_ID`` in the environment names another connection than ``queen_default``, ``QUEEN_BACKUP_FOLDER``
a folder of the worker for a ``pg_dump`` before anything is changed. They are no Dag parameters: whoever may
start a run may not thereby choose a database to change or a place to write to. Nor does a run go to ``base``,
which deletes every queue: that is for ``QueenHook.migrate("base")``.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Param, task

from airflow_provider_queen.client import schema
from airflow_provider_queen.exceptions import SchemaVersionError
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.operators.migrate import QueenMigrateOperator

QUEEN_CONN_ID = os.environ.get("QUEEN_CONN_ID", QueenHook.default_conn_name)
TARGET = "{{ '0000_v2' if params.rollback else params.target }}"

log = logging.getLogger(__name__)


@task
def preflight(params: dict[str, Any]) -> dict[str, Any]:
    """Server version, rights, running leases, size and backup; fails where a migration could not succeed."""
    found = schema.preflight(QueenHook(queen_conn_id=QUEEN_CONN_ID).dsn)
    log.info(
        "PostgreSQL %s; schema queen %s, %.1f MiB on disk, %d running leases",
        found.server_version,
        found.version or "not there",
        found.schema_bytes / 2**20,
        found.running_leases,
    )
    if found.copies:
        log.info("Every message is copied: as much disk again is needed, and freed when v2's tables go")
    up_to_date = (
        params["target"] == "head" and not params["rollback"] and found.version == schema.head_version()
    )
    if found.version is not None and not up_to_date and not os.environ.get("QUEEN_BACKUP_FOLDER"):
        log.warning("Have a backup (QUEEN_BACKUP_FOLDER on the worker makes one)")
    return asdict(found)


@task.short_circuit
def unless_dry_run(params: dict[str, Any]) -> bool:
    return not params["dry_run"]


@task
def backup(plan: dict[str, Any]) -> str | None:
    """``pg_dump`` of the schema, where a folder is named and something would be changed."""
    folder = os.environ.get("QUEEN_BACKUP_FOLDER")
    if not folder or not plan["changed"] or plan["from"] is None:
        return None
    path = schema.backup(QueenHook(queen_conn_id=QUEEN_CONN_ID).dsn, Path(folder))
    log.info("The schema queen as it is now: %s, for pg_restore", path)
    return str(path)


@task
def verify(migration: dict[str, Any]) -> dict[str, Any]:
    """The version is the one that was asked for, at head with all its views and functions; they answer."""
    hook = QueenHook(queen_conn_id=QUEEN_CONN_ID)
    found = hook.schema_version()
    if found != migration["to"]:
        raise SchemaVersionError(f"the schema queen is at {found or 'base'}, not at {migration['to']}")
    if found is not None and found < schema.head_version():
        log.info("The schema queen is at %s, older than this package needs", found)
        return {"queues": 0, "keeps_v2": False}
    with hook.get_conn() as connection:
        schema.check(connection)
        compared = schema.verification(connection)
    queues = len(hook.list_queues())
    hook.close()
    log.info("The schema queen is at %s, complete, with %d queues", found, queues)
    for row in compared:
        log.info(
            "From v2: queue %s, group %s: %d messages, checksum %s on both sides; %s pending, in v2 %s",
            row.queue_name,
            row.consumer_group or "-",
            row.messages,
            row.checksum,
            row.pending,
            row.pending_in_v2 or 0,
        )
    return {"queues": queues, "keeps_v2": bool(compared)}


@task.short_circuit
def while_v2_is_kept(verified: dict[str, Any]) -> bool:
    """Nothing is left to decide where v2's tables are not there, or not any more."""
    return bool(verified["keeps_v2"])


with DAG(
    dag_id="queen_migrate",
    doc_md=__doc__,
    schedule=None,
    catchup=False,
    max_active_runs=1,
    params={
        "target": Param(
            "head", type="string", pattern=r"^(head|\d{4}[a-z0-9_]*)$", description="head or a revision"
        ),
        "dry_run": Param(False, type="boolean", description="stop after the dry run"),
        "rollback": Param(False, type="boolean", description="back to the tables of Queen v2, with all data"),
    },
    tags=["queen", "maintenance"],
):
    plan = QueenMigrateOperator(task_id="dry_run", target=TARGET, dry_run=True, queen_conn_id=QUEEN_CONN_ID)
    migrate = QueenMigrateOperator(task_id="migrate", target=TARGET, queen_conn_id=QUEEN_CONN_ID)
    approve = ApprovalOperator(
        task_id="approve",
        subject="Drop the tables of Queen v2?",
        body="The queue runs on the present tables; the log of `verify` says what was compared. Approved, the"
        " schema `queen_v2` is dropped and its disk freed. Rejected, it stays: start this Dag again to be"
        " asked again, or with `rollback` to go back.",
    )
    contract = QueenMigrateOperator(task_id="contract", target="0002_drop_v2", queen_conn_id=QUEEN_CONN_ID)
    saved = backup(plan.output)
    verified = verify(migrate.output)
    preflight() >> plan >> unless_dry_run() >> saved >> migrate
    while_v2_is_kept(verified) >> approve >> contract
