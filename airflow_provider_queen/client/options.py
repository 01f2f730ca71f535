"""How a client talks to its database: session settings, pooling, retries. Each by name."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from airflow_provider_queen.exceptions import InvalidOptionError

# Above read committed a call may meet what was committed after its snapshot: then the server answers 40001,
# and the call is repeated.
ISOLATION_LEVELS = ("read committed", "repeatable read", "serializable")
_DURATION = re.compile(r"\d{1,9} ?(us|ms|s|min|h|d)?")


def nearest(value: object, known: Iterable[str], cutoff: float = 0.0) -> str | None:
    """The known name that is most like ``value``, which is probably what was meant; None below the cutoff."""
    return next(iter(difflib.get_close_matches(str(value), sorted(known), n=1, cutoff=cutoff)), None)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When to repeat what failed by chance: exponential backoff with a cap, and jitter against lockstep."""

    attempts: int = 10
    first_delay: float = 0.02
    longest_delay: float = 2.0
    random: Callable[[], float] = field(default=random.random, repr=False, compare=False)

    def delay(self, attempt: int) -> float | None:
        """Seconds before the attempt after ``attempt`` (1 is the first); None: give up."""
        if attempt >= self.attempts:
            return None
        return min(self.longest_delay, self.first_delay * 2.0 ** (attempt - 1)) * (0.5 + self.random() / 2)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Options of a client. Durations are milliseconds, or text as PostgreSQL writes it (``"30s"``).

    ``transaction_pooler`` is for a pooler that gives each transaction another server connection (PgBouncer's
    transaction mode): no prepared statements, settings only inside transactions, polling instead of LISTEN.
    """

    statement_timeout: int | str | None = None
    lock_timeout: int | str | None = None
    isolation_level: str | None = None
    transaction_pooler: bool = False
    poll_seconds: float = 5.0
    retry: RetryPolicy = RetryPolicy()

    def __post_init__(self) -> None:
        for name in ("statement_timeout", "lock_timeout"):
            _check_duration(name, getattr(self, name))
        if self.isolation_level is not None and self.isolation_level not in ISOLATION_LEVELS:
            raise InvalidOptionError(
                f"unknown isolation_level {self.isolation_level!r}; the nearest is"
                f" {nearest(self.isolation_level, ISOLATION_LEVELS)!r}"
            )
        if not isinstance(self.transaction_pooler, bool):
            raise InvalidOptionError(
                f"transaction_pooler is {self.transaction_pooler!r}, allowed are True and False"
            )
        if not 0 < self.poll_seconds <= 3600:
            raise InvalidOptionError(f"poll_seconds is {self.poll_seconds!r}, allowed is more than 0 to 3600")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> ClientOptions:
        """Options by name, as a connection's extra holds them."""
        for name in values:
            if name not in OPTION_NAMES:
                raise InvalidOptionError(
                    f"unknown client option {name!r}; the nearest is {nearest(name, OPTION_NAMES)!r}"
                )
        return cls(**values)

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """The session settings that these options ask for."""
        wanted = {
            "statement_timeout": self.statement_timeout,
            "lock_timeout": self.lock_timeout,
            "default_transaction_isolation": self.isolation_level,
        }
        return tuple((name, str(value)) for name, value in wanted.items() if value is not None)


OPTION_NAMES = frozenset(option.name for option in fields(ClientOptions)) - {"retry"}


def _check_duration(name: str, value: object) -> None:
    if value is None or (isinstance(value, str) and _DURATION.fullmatch(value)):
        return
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
        return
    raise InvalidOptionError(f"{name} is {value!r}, allowed are milliseconds or a text such as '30s'")
