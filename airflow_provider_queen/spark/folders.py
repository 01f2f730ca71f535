"""Folders for files that must not appear half-written: on this machine's disks or in an object store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyarrow import fs

from airflow_provider_queen.exceptions import InvalidOptionError


class Folder:
    """A path or any URI that Arrow understands. Pickled into Spark's tasks, so it holds nothing else."""

    def __init__(self, location: str) -> None:
        # Executors have working directories of their own.
        self.location = location if "://" in location else os.path.abspath(location)

    def open(self) -> tuple[Any, str]:
        """The file system, and the path of the folder in it."""
        try:
            filesystem, root = fs.FileSystem.from_uri(self.location)
        except (pa.ArrowInvalid, OSError) as error:
            raise InvalidOptionError(f"no files can be kept at {self.location!r}: {error}") from None
        return filesystem, root.rstrip("/")

    def create(self, name: str) -> None:
        """Create a folder in it, and it itself."""
        filesystem, root = self.open()
        try:
            filesystem.create_dir(f"{root}/{name}", recursive=True)
        except OSError as error:
            raise InvalidOptionError(f"no files can be kept at {self.location!r}: {error}") from None

    @contextmanager
    def appearing(self, folder: str, name: str) -> Iterator[Any]:
        """Write a file that gets its name when it is whole, and not at all where the block fails."""
        filesystem, root = self.open()
        path = f"{root}/{folder}/{name}"
        with filesystem.open_output_stream(f"{path}.part") as stream:
            yield stream
        to_disk(filesystem, f"{path}.part")
        filesystem.move(f"{path}.part", path)
        to_disk(filesystem, f"{root}/{folder}")


def to_disk(filesystem: Any, path: str) -> None:
    """Let a file survive the machine, too."""
    if isinstance(filesystem, fs.LocalFileSystem):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
