"""Messages in Parquet files that outlive the database's copy.

    <location>/queue=<name>/day=<UTC day>/<run>-<random>.parquet    the messages
    <location>/_manifests/<run>.json                               what belongs to the archive

A file counts only when a manifest names it, and a manifest appears whole or not at all. Whatever else lies in
the folders was left by a run that was killed, and the next run removes it.

The location is a path or any URI that :func:`pyarrow.fs.FileSystem.from_uri` understands, and the same for
driver and executors. An archive belongs to one database.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import fs

from airflow_provider_queen.exceptions import QueenError
from airflow_provider_queen.spark.connection import ConnectionInfo, call
from airflow_provider_queen.spark.folders import Folder, to_disk
from airflow_provider_queen.spark.ranges import Range, bounds, scan_messages, size
from airflow_provider_queen.spark.schemas import MESSAGES, arrow_schema

VERSION = 1
MANIFESTS = "_manifests"
#: A folder's name has at most 255 bytes; longer names of queues are cut, with a hash to keep them apart.
LONGEST_NAME = 180
#: The names that :class:`_Files` and :meth:`Archive.commit` give; nothing else is ever removed.
OWN_FILE = re.compile(
    r"queue=[^/]+/day=[0-9-]+/\d{8}T\d{6}Z-[0-9a-f]{8}-[0-9a-f]{32}\.parquet"
    rf"|{MANIFESTS}/\d{{8}}T\d{{6}}Z-[0-9a-f]{{8}}\.json\.part"
)
CHECKED = (
    "lane_id",
    "seq",
    "created_at",
    "transaction_id",
    "trace_id",
    "origin_transaction_id",
    "requeued_from",
    "is_encrypted",
    "payload",
)


class ArchiveError(QueenError):
    """The archive is not what it should be; nothing was deleted because of it."""


@dataclass(frozen=True)
class ArchivedFile:
    """A Parquet file, by its path inside the archive."""

    path: str
    messages: int


@dataclass(frozen=True)
class ArchivedLane:
    """What one run archived of a lane. Two lanes are the same when id and creation time are."""

    lane_id: int
    lane_created_at: str
    queue_name: str
    partition_name: str
    priority: int
    first_seq: int
    last_seq: int


@dataclass(frozen=True)
class Manifest:
    """One run's part of the archive."""

    run_id: str
    archived_at: str
    lanes: list[ArchivedLane]
    files: list[ArchivedFile]

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        content: dict[str, Any] = json.loads(text)
        if content.pop("version") != VERSION:
            raise ArchiveError("a manifest of the archive was written by another version of this program")
        lanes = [ArchivedLane(**lane) for lane in content.pop("lanes")]
        files = [ArchivedFile(**file) for file in content.pop("files")]
        return cls(lanes=lanes, files=files, **content)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)


@dataclass(frozen=True)
class Check:
    """Count and checksum of some messages of a lane."""

    messages: int = 0
    checksum: int = 0


def new_run_id() -> str:
    """Sorts by time, and two runs never share one."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:8]}"


class Archive(Folder):
    """The folder of the archive."""

    def prepare(self) -> None:
        """Create the folder now, so that a place that cannot be written is found out before any work."""
        self.create(MANIFESTS)

    def manifests(self) -> list[Manifest]:
        """All manifests, oldest first."""
        filesystem, root = self.open()
        selector = fs.FileSelector(f"{root}/{MANIFESTS}", allow_not_found=True)
        paths = sorted(
            info.path for info in filesystem.get_file_info(selector) if info.path.endswith(".json")
        )
        return [self._read_manifest(filesystem, path) for path in paths]

    @staticmethod
    def _read_manifest(filesystem: Any, path: str) -> Manifest:
        with filesystem.open_input_stream(path) as stream:
            return Manifest.from_json(stream.read().decode())

    def archived_through(self, manifests: Sequence[Manifest]) -> dict[tuple[int, str], int]:
        """Up to which seq each lane is archived."""
        through: dict[tuple[int, str], int] = {}
        for manifest in manifests:
            for lane in manifest.lanes:
                key = (lane.lane_id, lane.lane_created_at)
                through[key] = max(through.get(key, 0), lane.last_seq)
        return through

    def remove_leftovers(self, manifests: Sequence[Manifest]) -> int:
        """Remove the files that no manifest names. Only while no other run writes: the job's lock is held."""
        filesystem, root = self.open()
        named = {file.path for manifest in manifests for file in manifest.files}
        found = filesystem.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True))
        inside = [info.path[len(root) + 1 :] for info in found if info.is_file]
        leftovers = [path for path in inside if OWN_FILE.fullmatch(path) and path not in named]
        for path in leftovers:
            filesystem.delete_file(f"{root}/{path}")
        return len(leftovers)

    def write(self, connection: ConnectionInfo, run_id: str, ranges: Sequence[Range]) -> list[ArchivedFile]:
        """Copy the messages of some ranges into files, one for each queue and day that they touch."""
        schema = arrow_schema(MESSAGES)
        filesystem, root = self.open()
        files = _Files(filesystem, root, run_id, schema)
        try:
            with connection.connect_arrow() as database:
                for batch in scan_messages(database, MESSAGES.fieldNames(), ranges):
                    if batch.num_rows:
                        files.append(batch)
        finally:
            files.close()
        return files.written()

    def check(self, files: Sequence[ArchivedFile]) -> dict[int, Check]:
        """Read files back and return count and checksum of each lane in them."""
        filesystem, root = self.open()
        messages: Counter[int] = Counter()
        sums: Counter[int] = Counter()
        for file in files:
            with pq.ParquetFile(f"{root}/{file.path}", filesystem=filesystem) as parquet:
                for batch in parquet.iter_batches(columns=list(CHECKED)):
                    lane_ids = batch["lane_id"].to_pylist()
                    messages.update(lane_ids)
                    for lane_id, value in zip(lane_ids, _checksums(batch), strict=True):
                        sums[lane_id] += value
        return {lane_id: Check(messages[lane_id], sums[lane_id]) for lane_id in messages}

    def commit(self, manifest: Manifest) -> None:
        """Make a run's files part of the archive: the manifest gets its name when it is whole."""
        with self.appearing(MANIFESTS, f"{manifest.run_id}.json") as stream:
            stream.write(manifest.to_json().encode())

    def paths(self, files: Sequence[ArchivedFile]) -> list[str]:
        """Where files are, for Spark: to it a path without a scheme is one of its default file system."""
        base = self.location if "://" in self.location else f"file://{self.location}"
        return [f"{base.rstrip('/')}/{file.path}" for file in files]


class _Files:
    """The open files of one task: one per queue and day."""

    def __init__(self, filesystem: Any, root: str, run_id: str, schema: pa.Schema) -> None:
        self._filesystem = filesystem
        self._root = root
        self._run_id = run_id
        self._schema = schema
        self._writers: dict[str, pq.ParquetWriter] = {}
        self._messages: dict[str, int] = {}

    def append(self, batch: pa.RecordBatch) -> None:
        days = pc.strftime(batch["created_at"], format="%Y-%m-%d")
        keyed = pa.table({"queue": batch["queue_name"], "day": days})
        for group in keyed.group_by(["queue", "day"]).aggregate([]).to_pylist():
            mine = pc.and_(pc.equal(batch["queue_name"], group["queue"]), pc.equal(days, group["day"]))
            rows = batch.filter(mine)
            folder = f"queue={folder_name(group['queue'])}/day={group['day']}"
            self._writer(folder).write_batch(rows)
            self._messages[folder] = self._messages.get(folder, 0) + rows.num_rows

    def _writer(self, folder: str) -> pq.ParquetWriter:
        if folder not in self._writers:
            self._filesystem.create_dir(f"{self._root}/{folder}", recursive=True)
            # A name of its own per attempt: a task that Spark repeats never writes where another one does.
            path = f"{self._root}/{folder}/{self._run_id}-{uuid.uuid4().hex}.parquet"
            self._writers[folder] = pq.ParquetWriter(
                path, self._schema, filesystem=self._filesystem, compression="zstd"
            )
        return self._writers[folder]

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
            to_disk(self._filesystem, writer.where)

    def written(self) -> list[ArchivedFile]:
        return [
            ArchivedFile(writer.where[len(self._root) + 1 :], self._messages[folder])
            for folder, writer in self._writers.items()
        ]


def folder_name(queue_name: str) -> str:
    """A queue's name as part of a path, whatever characters it has."""
    name = quote(queue_name, safe="")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(queue_name.encode()).hexdigest()[:12]}"


def _checksums(batch: pa.RecordBatch) -> Iterator[int]:
    """The checksum of each message, as ``queen.range_checksums`` computes it."""
    columns = {name: batch[name] for name in CHECKED}
    columns["created_at"] = pc.cast(batch["created_at"], pa.int64())
    columns["is_encrypted"] = pc.cast(batch["is_encrypted"], pa.int8())
    texts = [pc.fill_null(pc.cast(column, pa.string()), "") for column in columns.values()]
    for text in pc.binary_join_element_wise(*texts, "\x1f").to_pylist():
        digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
        yield int.from_bytes(digest[:8], "big") >> 4


@dataclass(frozen=True)
class Portion:
    """What one task archives, and then what it has written."""

    ranges: list[Range]
    files: list[ArchivedFile]


def write_portion(connection: ConnectionInfo, archive: Archive, run_id: str, ranges: list[Range]) -> Portion:
    """Archive some ranges."""
    return Portion(ranges, archive.write(connection, run_id, ranges))


def verify_portion(connection: ConnectionInfo, archive: Archive, portion: Portion) -> None:
    """Compare what the files hold with what the database holds: as many messages, and the same ones."""
    with connection.connect() as database:
        rows = call(database, "range_checksums", ["lane_id", "messages", "checksum"], *bounds(portion.ranges))
    stored = {lane_id: Check(messages, int(checksum)) for lane_id, messages, checksum in rows}
    if sum(check.messages for check in stored.values()) != size(portion.ranges):
        raise ArchiveError(
            "messages were removed by somebody else while they were archived; nothing was deleted, run again"
        )
    found = archive.check(portion.files)
    for lane_id, check in stored.items():
        if found.get(lane_id) != check:
            copied = found.get(lane_id, Check())
            raise ArchiveError(
                f"the archive differs from the database in lane {lane_id}: {copied.messages} of"
                f" {check.messages} messages, checksum {copied.checksum} for {check.checksum};"
                " nothing was deleted"
            )
