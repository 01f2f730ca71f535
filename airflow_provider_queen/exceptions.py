"""Every error that Queen raises on purpose. All derive from :class:`QueenError`."""

from __future__ import annotations


class QueenError(Exception):
    """Base class: catching it catches whatever Queen itself has to say."""


class QueueNotFoundError(QueenError):
    """The named queue does not exist; the message names the nearest one that does."""


class QueueFullError(QueenError):
    """The push would exceed the queue's ``max_queue_size``; nothing of it was stored."""


class LeaseLostError(QueenError):
    """The lease was settled, taken over or has expired and was given away; nothing was changed."""


class InvalidOptionError(QueenError, ValueError):
    """A value that the caller passed cannot be used; the message names it and says what is allowed."""


class EncryptionError(QueenError):
    """The queue is encrypted and no key fits, or a payload was altered."""


class SchemaVersionError(QueenError):
    """The database has no Queen schema, or another version of it than this package needs."""


class DatabaseError(QueenError):
    """PostgreSQL refused or failed a call for a reason outside the queue's own rules.

    The driver's own error is not attached: its detail and context lines may quote a payload.
    """

    def __init__(self, message: str, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class DatabaseUnreachableError(DatabaseError):
    """No connection to the database could be opened; nothing was sent."""


class ConnectionLostError(DatabaseError):
    """The connection broke during a call that is not safe to repeat: whether it took effect is unknown."""


class TransactionConflictError(DatabaseError):
    """A serialization failure or a deadlock: nothing was changed, the whole transaction may be repeated."""


class ProcessingError(QueenError):
    """A task could not process some of its messages; each of them was settled with its own error."""
