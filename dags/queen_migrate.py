"""Brings the schema ``queen`` to a version: preflight, dry run, migration, verification.

On a database that is up to date it changes nothing and says so. The SQL of the dry run is the XCom ``sql`` of
its task. A migration is one transaction: where it fails, the database is as it was before.

``QUEEN_CONN_ID`` in the environment names another connection than ``queen_default``. It is no Dag parameter:
whoever may start a run may not thereby choose a database to change. Nor does a run go to ``base``, which
deletes every queue: that is for ``QueenHook.migrate("base")``.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from typing import Any

from airflow.sdk import DAG, Param, task

from airflow_provider_queen.client import schema
from airflow_provider_queen.exceptions import SchemaVersionError
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.operators.migrate import QueenMigrateOperator

QUEEN_CONN_ID = os.environ.get("QUEEN_CONN_ID", QueenHook.default_conn_name)

log = logging.getLogger(__name__)


@task
def preflight(params: dict[str, Any]) -> dict[str, Any]:
    """Server version, rights, running leases and size; fails where a migration could not succeed."""
    found = schema.preflight(QueenHook(queen_conn_id=QUEEN_CONN_ID).dsn)
    log.info(
        "PostgreSQL %s; schema queen %s, %.1f MiB on disk, %d running leases",
        found.server_version,
        found.version or "not there",
        found.schema_bytes / 2**20,
        found.running_leases,
    )
    if found.version is not None and (params["target"] != "head" or found.version != schema.head_version()):
        log.warning("Have a backup: a way down brings back the tables, not what it dropped from them")
    return asdict(found)


@task.short_circuit
def unless_dry_run(params: dict[str, Any]) -> bool:
    return not params["dry_run"]


@task
def verify(migration: dict[str, Any]) -> int:
    """The version is the one that was asked for, at head with all its views and functions; they answer."""
    hook = QueenHook(queen_conn_id=QUEEN_CONN_ID)
    found = hook.schema_version()
    if found != migration["to"]:
        raise SchemaVersionError(f"the schema queen is at {found or 'base'}, not at {migration['to']}")
    if found != schema.head_version():
        log.info("The schema queen is at %s, older than this package needs", found)
        return 0
    with hook.get_conn() as connection:
        schema.check(connection)
    queues = len(hook.list_queues())
    hook.close()
    log.info("The schema queen is at %s, complete, with %d queues", found, queues)
    return queues


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
    },
    tags=["queen", "maintenance"],
):
    plan = QueenMigrateOperator(
        task_id="dry_run", target="{{ params.target }}", dry_run=True, queen_conn_id=QUEEN_CONN_ID
    )
    migrate = QueenMigrateOperator(
        task_id="migrate", target="{{ params.target }}", queen_conn_id=QUEEN_CONN_ID
    )
    preflight() >> plan >> unless_dry_run() >> migrate >> verify(migrate.output)
