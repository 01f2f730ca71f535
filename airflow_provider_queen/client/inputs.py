"""What callers pass in, checked before the database hears of it. Errors name the value, but no payload."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from airflow_provider_queen.client.options import nearest
from airflow_provider_queen.client.results import QUEUE_OPTIONS, DeadLetter, Message, StoredMessage
from airflow_provider_queen.exceptions import InvalidOptionError

MAX_NAME_LENGTH = 255
MAX_PRIORITY = 9
SUBSCRIPTION_MODES = ("all", "new", "timestamp")
SEEK_POSITIONS = ("beginning", "end")
MESSAGE_KEYS = frozenset({"payload", "partition", "transaction_id", "trace_id", "priority"})

_LARGEST_INT = 2**31 - 1
_CANONICAL_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
# What is no JSON must not become any: no NaN. Text stays readable: no \u escapes where UTF-8 does.
_encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def name(what: str, value: object) -> str:
    """A name: 1 to 255 characters that PostgreSQL can store."""
    if not isinstance(value, str):
        raise InvalidOptionError(f"{what} is {_shown(value)}, which is no text")
    if not value:
        raise InvalidOptionError(f"{what} is '', at least one character is needed")
    if len(value) > MAX_NAME_LENGTH:
        raise InvalidOptionError(
            f"{what} is {_shown(value)} with {len(value)} characters, allowed are {MAX_NAME_LENGTH}"
        )
    _check_characters(what, value)
    return value


def optional_name(what: str, value: object) -> str | None:
    return None if value is None else name(what, value)


def positive(what: str, value: object) -> int:
    """A whole number from 1."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST_INT:
        raise InvalidOptionError(
            f"{what} is {_shown(value)}, allowed are whole numbers from 1 to {_LARGEST_INT}"
        )
    return value


def optional_positive(what: str, value: object) -> int | None:
    return None if value is None else positive(what, value)


def not_negative(what: str, value: object) -> int:
    return 0 if type(value) is int and value == 0 else positive(what, value)


def seconds(what: str, value: object) -> float:
    """A duration from 0, finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidOptionError(f"{what} is {_shown(value)}, allowed are seconds from 0")
    return float(value)


def flag(what: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidOptionError(f"{what} is {_shown(value)}, allowed are True and False")
    return value


def instant(what: str, value: object) -> datetime:
    """A point in time: a datetime with a zone, or its ISO text."""
    moment = value
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
    if not isinstance(moment, datetime):
        raise InvalidOptionError(f"{what} is {_shown(value)}, which is no datetime")
    if moment.utcoffset() is None:
        raise InvalidOptionError(f"{what} is {value}, which has no time zone: nobody can tell when that is")
    return moment


def uuid(what: str, value: object) -> str:
    """A uuid in its canonical text."""
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, str):
        if _CANONICAL_UUID.fullmatch(value):
            return value
        try:
            return str(UUID(value))
        except ValueError:
            pass
    raise InvalidOptionError(f"{what} is {_shown(value)}, which is no uuid")


def error_text(value: object) -> str | None:
    """What a consumer says of a failure. Made storable instead of refused: it often quotes foreign text."""
    if value is None:
        return None
    return str(value).replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages as the columns that ``queen.push`` takes."""

    payloads: list[str]
    transaction_ids: list[str]
    generated: list[bool]
    """Which transaction ids are ours: such a message can be a duplicate only of its own first attempt."""
    partitions: list[str] | None
    trace_ids: list[str | None] | None
    priorities: list[int] | None


def batch(messages: object) -> Batch:
    """Check and transpose what ``push`` was given.

    Every message gets a transaction id here: a push whose answer was lost can be repeated with the same ones.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InvalidOptionError(
            f"messages is a {type(messages).__name__}, needed is a list of mappings with the key 'payload'"
        )
    payloads: list[str] = []
    transaction_ids: list[str] = []
    generated: list[bool] = []
    partitions: list[str] = []
    trace_ids: list[str | None] = []
    priorities: list[int] = []
    stem = secrets.token_hex(16)
    checked_partitions = {"Default"}
    for position, message in enumerate(messages):
        _check_keys(position, message)
        payloads.append(payload_text(f"message {position}: payload", message["payload"]))
        transaction_id = message.get("transaction_id")
        generated.append(transaction_id is None)
        transaction_ids.append(
            f"{stem}-{position}"
            if transaction_id is None
            else name(f"message {position}: transaction_id", transaction_id)
        )
        partition = message.get("partition")
        if partition is None:
            partition = "Default"
        elif not isinstance(partition, str) or partition not in checked_partitions:
            checked_partitions.add(name(f"message {position}: partition", partition))
        partitions.append(partition)
        trace_id = message.get("trace_id")
        trace_ids.append(None if trace_id is None else uuid(f"message {position}: trace_id", trace_id))
        priorities.append(_priority(position, message.get("priority")))
    return Batch(
        payloads,
        transaction_ids,
        generated,
        _compressed(partitions, "Default"),
        _compressed(trace_ids, None),
        _compressed(priorities, 0),
    )


def payload_text(what: str, value: object) -> str:
    """``value`` as JSON text, or an error without a word of it."""
    reason: str
    try:
        text = _encode_json(value)
    except TypeError as error:
        reason = str(error)  # names types only
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        circular = str(error).startswith("Circular")
        reason = (
            "it contains itself"
            if circular
            else "it has a number that JSON has not: NaN, Infinity, or too long"
        )
    else:
        if text.isascii() or _is_storable(text):
            return text
        reason = "it has half of a surrogate pair, which is no Unicode text"
    # Outside of the except blocks: from Python 3.12 the encoder's errors quote keys and values.
    raise InvalidOptionError(f"{what} is no JSON: {reason}")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which messages: of one queue, or of every queue with a namespace and a task."""

    queue_name: str | None
    partition: str | None
    consumer_group: str | None
    namespace: str | None
    task: str | None


def selection(
    queue_name: object, partition: object, consumer_group: object, namespace: object, task: object
) -> Selection:
    """One queue, or a wildcard over queues; never both, never neither."""
    wildcard = namespace is not None or task is not None
    if queue_name is not None and wildcard:
        raise InvalidOptionError(
            f"queue_name is {_shown(queue_name)} and namespace or task is given as well"
            f" ({_shown(namespace)}, {_shown(task)}): name a queue or a namespace and task"
        )
    if queue_name is None and not wildcard:
        raise InvalidOptionError(
            "queue_name, namespace and task are None: name a queue, a namespace or a task"
        )
    if partition is not None and wildcard:
        raise InvalidOptionError(f"partition is {_shown(partition)}, which needs a queue_name")
    return Selection(
        optional_name("queue_name", queue_name),
        optional_name("partition", partition),
        optional_name("consumer_group", consumer_group),
        optional_name("namespace", namespace),
        optional_name("task", task),
    )


def subscription(mode: object, since: object) -> tuple[str, datetime | None]:
    """A subscription mode, and for ``timestamp`` its time."""
    if not isinstance(mode, str) or mode not in SUBSCRIPTION_MODES:
        raise InvalidOptionError(
            f"unknown subscription_mode {_shown(mode)}; the nearest is {nearest(mode, SUBSCRIPTION_MODES)!r},"
            f" allowed are {', '.join(SUBSCRIPTION_MODES)}"
        )
    if mode == "timestamp":
        if since is None:
            raise InvalidOptionError("subscription_from is None, subscription_mode 'timestamp' needs it")
        return mode, instant("subscription_from", since)
    if since is not None:
        raise InvalidOptionError(
            f"subscription_from is {_shown(since)} with subscription_mode {mode!r}: that is for 'timestamp'"
        )
    return mode, None


def seek_target(to: object) -> tuple[str | None, datetime | None]:
    """Where to move a cursor: a word or a point in time."""
    if isinstance(to, str):
        if to in SEEK_POSITIONS:
            return to, None
        if not to[:1].isdigit():
            raise InvalidOptionError(
                f"unknown position {_shown(to)} to seek; the nearest is {nearest(to, SEEK_POSITIONS)!r},"
                f" allowed are {', '.join(SEEK_POSITIONS)} or a datetime"
            )
    return None, instant("to", to)


def queue_options(options: Mapping[str, object]) -> str:
    """The options of ``configure_queue`` as JSON; their values are judged by the database."""
    for option in options:
        if option not in QUEUE_OPTIONS:
            raise InvalidOptionError(
                f"unknown queue option {option!r}; the nearest is {nearest(option, QUEUE_OPTIONS)!r}"
            )
    for option in ("namespace", "task"):
        optional_name(option, options.get(option))
    return payload_text("the queue's options", dict(options))


@dataclass(frozen=True, slots=True)
class Settlement:
    """Messages by lease: in each list one multirange of seqs, as text, per lease."""

    lease_ids: list[str]
    completed: list[str | None]
    failed: list[str | None]
    rejected: list[str | None]
    released: list[str | None]


OUTCOMES = ("completed", "failed", "rejected", "released")


def settlement(**outcomes: object) -> Settlement:
    """Group messages by lease and outcome, and refuse those that cannot be settled."""
    leases: dict[str, dict[int, str]] = {}
    for outcome in OUTCOMES:
        for message in leased(outcome, outcomes.get(outcome)):
            settled = leases.setdefault(message.lease_id or "", {})
            if settled.setdefault(message.seq, outcome) != outcome:
                raise InvalidOptionError(
                    f"{message!r} is to be {settled[message.seq]} and {outcome}: choose one"
                )
    ranges: dict[str, list[str | None]] = {outcome: [] for outcome in OUTCOMES}
    for settled in leases.values():
        for outcome, texts in ranges.items():
            texts.append(multirange(sorted(seq for seq, chosen in settled.items() if chosen == outcome)))
    return Settlement(list(leases), **ranges)


def leased(what: str, messages: object) -> list[Message]:
    """Messages that are held by a lease. One alone is taken as a list of one; None as an empty list."""
    if messages is None:
        return []
    if isinstance(messages, Message):
        messages = [messages]
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise InvalidOptionError(
            f"{what} is a {type(messages).__name__}, needed are messages as pop returned them"
        )
    checked: list[Message] = []
    for message in messages:
        if not isinstance(message, Message):
            raise InvalidOptionError(
                f"{what} has a {type(message).__name__}, needed are messages as pop returned them"
            )
        if message.lease_id is None:
            raise InvalidOptionError(f"{message!r} has no lease: it was acknowledged when it was popped")
        checked.append(message)
    return checked


def multirange(seqs: Sequence[int]) -> str | None:
    """Sorted numbers as the text of an int8multirange; None for no numbers."""
    if not seqs:
        return None
    first = last = seqs[0]
    if seqs[-1] - first == len(seqs) - 1:  # a whole batch, as nearly always
        return f"{{[{first},{seqs[-1]}]}}"
    runs: list[str] = []
    for seq in seqs[1:]:
        if seq != last + 1:
            runs.append(f"[{first},{last}]")
            first = seq
        last = seq
    runs.append(f"[{first},{last}]")
    return f"{{{','.join(runs)}}}"


def page_after_message(value: object) -> str | None:
    """Where a page of messages begins: the last message of the page before, or its id."""
    if isinstance(value, StoredMessage):
        return value.id
    return None if value is None else uuid("after", value)


def page_after_dead_letter(value: object) -> int | None:
    """Where a page of dead letters begins: the last one of the page before, or its number."""
    return None if value is None else dead_letter_id("after", value)


def dead_letter_ids(value: object) -> list[int] | None:
    """Numbers of dead letters, or dead letters; None means all of them, an empty list none."""
    if value is None:
        return None
    if isinstance(value, int | DeadLetter):
        value = [value]
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InvalidOptionError(f"ids is {_shown(value)}, needed are numbers of dead letters")
    return [dead_letter_id("ids", each) for each in value]


def dead_letter_id(what: str, value: object) -> int:
    if isinstance(value, DeadLetter):
        return value.id
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**63:
        raise InvalidOptionError(f"{what} has {_shown(value)}, which is no number of a dead letter")
    return value


def _check_keys(position: int, message: object) -> None:
    if not isinstance(message, Mapping):
        raise InvalidOptionError(
            f"message {position} is a {type(message).__name__}, needed is a mapping with the key 'payload'"
        )
    if not message.keys() <= MESSAGE_KEYS:
        unknown = next(key for key in message if key not in MESSAGE_KEYS)
        raise InvalidOptionError(
            f"message {position} has the unknown key {_shown(unknown)}; the nearest is"
            f" {nearest(unknown, MESSAGE_KEYS)!r}"
        )
    if "payload" not in message:
        raise InvalidOptionError(f"message {position} has no payload")


def _priority(position: int, value: object) -> int:
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_PRIORITY:
        raise InvalidOptionError(
            f"message {position}: priority is {_shown(value)}, allowed are 0 to {MAX_PRIORITY}"
        )
    return value


def _compressed(values: list[Any], default: object) -> list[Any] | None:
    """One element stands for a list of equal ones, and None for the default: less to send and to read."""
    if not values:
        return None
    first = values[0]
    if values.count(first) != len(values):
        return values
    return None if first == default else [first]


def _check_characters(what: str, value: str) -> None:
    if "\0" in value:
        raise InvalidOptionError(
            f"{what} is {_shown(value)} with a NUL character, which PostgreSQL cannot store"
        )
    if not (value.isascii() or _is_storable(value)):
        raise InvalidOptionError(
            f"{what} is {_shown(value)} with half of a surrogate pair, which is no Unicode text"
        )


def _is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    """A value as an error names it: short enough to read."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
