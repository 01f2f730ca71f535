"""What a migration did, or would do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MigrationReport:
    """The outcome of one run. ``None`` as a version is base: no schema."""

    from_version: str | None
    to_version: str | None
    applied: list[str]
    """Revisions that ran, in the order they ran; on the way down, those that were undone."""
    reapplied: list[str]
    """Files of views and functions that were applied again; all of them or none."""
    abandoned: bool = False
    """Whether an upgrade from v2 was begun and is given up now; v2 is as it was before."""

    @property
    def changed(self) -> bool:
        return bool(self.applied or self.reapplied or self.abandoned)


@dataclass(frozen=True)
class MigrationPlan:
    """What a run would do at this moment: its report, and the script for ``psql -f``."""

    report: MigrationReport
    sql: str
