"""Retention: the database says what may go, the archive takes a copy, the database deletes what is archived.

    plan -> write files -> compare them with the database -> commit the manifest -> delete in small pieces

Only the manifest's commit moves a message from "not archived" to "archived", and only archived messages are
deleted. A run that was killed before it leaves files that no manifest names: the next run removes them and
starts again. One that was killed after it left messages that the next run deletes without another copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from airflow_provider_queen.spark.application import Say
from airflow_provider_queen.spark.archive import (
    Archive,
    ArchivedLane,
    Manifest,
    new_run_id,
    verify_portion,
    write_portion,
)
from airflow_provider_queen.spark.connection import ConnectionInfo, call
from airflow_provider_queen.spark.jobs import Runner, call_until_nothing
from airflow_provider_queen.spark.ranges import Range, cut_ranges, size

JOB = "queen-retention"
#: Messages per task: small enough to repeat, large enough for files worth keeping.
PORTION = 250_000
LANES_PER_CALL = 1_000
LANE_COLUMNS = (
    "lane_id",
    "lane_created_at",
    "queue_name",
    "partition_name",
    "priority",
    "retention_type",
    "first_seq",
    "last_seq",
)


@dataclass(frozen=True)
class Deletable:
    """The messages of a lane that retention may delete."""

    lane_id: int
    lane_created_at: datetime
    queue_name: str
    partition_name: str
    priority: int
    retention_type: str
    first_seq: int
    last_seq: int

    @property
    def key(self) -> tuple[int, str]:
        return self.lane_id, self.lane_created_at.astimezone(UTC).isoformat()

    @property
    def messages(self) -> int:
        return self.last_seq - self.first_seq + 1


def deletable(connection: ConnectionInfo, queue_name: str | None) -> list[Deletable]:
    """Ask the database what may go."""
    with connection.connect() as database:
        return [Deletable(*row) for row in call(database, "deletable_ranges", LANE_COLUMNS, queue_name)]


def not_archived(plan: Sequence[Deletable], through: dict[tuple[int, str], int]) -> list[Deletable]:
    """What of the plan is still to be archived."""
    rest = [
        Deletable(**{**vars(lane), "first_seq": max(lane.first_seq, through.get(lane.key, 0) + 1)})
        for lane in plan
    ]
    return [lane for lane in rest if lane.messages > 0]


def archive_lanes(
    connection: ConnectionInfo, archive: Archive, runner: Runner, lanes: Sequence[Deletable], say: Say
) -> Manifest:
    """Copy lanes into the archive, compare the copy with the database, and then name it in a manifest."""
    run_id = new_run_id()
    ranges = [Range(lane.lane_id, lane.first_seq, lane.last_seq) for lane in lanes]
    portion_rows = min(PORTION, -(-size(ranges) // runner.parallelism))
    pieces = list(cut_ranges(ranges, portion_rows))
    say(f"archiving {size(ranges)} messages of {len(lanes)} lanes in {len(pieces)} pieces")
    portions = runner.map(partial(write_portion, connection, archive, run_id), pieces)
    files = [file for portion in portions for file in portion.files]
    say(f"{len(files)} files written, comparing them with the database")
    runner.map(partial(verify_portion, connection, archive), portions)
    manifest = Manifest(
        run_id=run_id,
        archived_at=datetime.now(UTC).isoformat(),
        lanes=[
            ArchivedLane(
                lane_id=lane.lane_id,
                lane_created_at=lane.key[1],
                queue_name=lane.queue_name,
                partition_name=lane.partition_name,
                priority=lane.priority,
                first_seq=lane.first_seq,
                last_seq=lane.last_seq,
            )
            for lane in lanes
        ],
        files=files,
    )
    archive.commit(manifest)
    say(f"archived as {run_id}")
    return manifest


def delete_archived(
    connection: ConnectionInfo,
    plan: Sequence[Deletable],
    through: dict[tuple[int, str], int],
    chunk: int,
    say: Say,
) -> int:
    """Delete what is archived, in short transactions."""
    targets = [(lane.lane_id, min(lane.last_seq, through[lane.key])) for lane in plan if lane.key in through]
    deleted = 0
    for start in range(0, len(targets), LANES_PER_CALL):
        lane_ids, seqs = (
            list(column) for column in zip(*targets[start : start + LANES_PER_CALL], strict=True)
        )
        deleted += call_until_nothing(connection, say, "delete_archived", "deleted", lane_ids, seqs, chunk)
    return deleted


def delete_without_archive(connection: ConnectionInfo, queue_name: str | None, chunk: int, say: Say) -> int:
    """Delete what may go, in short transactions."""
    return call_until_nothing(connection, say, "retain", "deleted", queue_name, chunk)
