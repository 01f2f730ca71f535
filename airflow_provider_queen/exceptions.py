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
