"""What the clients do, without doing it: each operation is a generator of steps.

An operation checks its input, yields steps (a call of an SQL function, a pause), gets each one's answer and
returns the result. The blocking and the asyncio client only carry out steps, so both behave alike by
construction, and a test can answer the steps without a database. An operation that fails in its checks, or
has nothing to do, ends before its first step: no connection is even opened then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeAlias, TypeVar

from airflow_provider_queen.client import inputs
from airflow_provider_queen.client.encryption import Keyring, no_key
from airflow_provider_queen.client.errors import EncryptionChangedError
from airflow_provider_queen.client.options import ClientOptions
from airflow_provider_queen.client.results import (
    IS_ENCRYPTED,
    ORIGIN_TRANSACTION_ID,
    PAYLOAD,
    QUEUE_NAME,
    TRANSACTION_ID,
    ConsumerGroupInfo,
    DeadLetter,
    Depth,
    Evicted,
    Lease,
    Message,
    PartitionStats,
    PushedBatch,
    PushResult,
    QueueInfo,
    Requeued,
    Retained,
    Row,
    SettleResult,
    StoredMessage,
    group_name,
)
from airflow_provider_queen.exceptions import (
    EncryptionError,
    InvalidOptionError,
    LeaseLostError,
    QueenError,
)

T = TypeVar("T")

CHANNEL = "queen_ready"
# How soon to look again when a message is ready and yet was not popped: another consumer is at it.
_SHORTEST_PAUSE = 0.02
# Without notifications, how often to look for what no known time announces.
_POLL_SECONDS_WITHOUT_LISTEN = 1.0


@dataclass(frozen=True, slots=True)
class Statement:
    """A call of one SQL function.

    ``repeatable``: running it twice is as good as once, so it may be repeated when the connection broke and
    nobody knows whether it ran. ``writes``: it waits for locks that other transactions hold.
    """

    sql: bytes
    repeatable: bool
    writes: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A statement with its parameters. Answered with the rows."""

    statement: Statement
    parameters: tuple[object, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Listen:
    """Begin, or end, to hear of messages that become ready."""

    on: bool


@dataclass(frozen=True, slots=True)
class Pause:
    """Wait until a queue gets messages (any queue for None), at most some seconds."""

    seconds: float
    queue_name: str | None
    listening: bool


Step: TypeAlias = Call | Listen | Pause
Operation: TypeAlias = Generator[Step, Any, T]


class Progress(Generic[T]):
    """An operation under way: ``step`` is what to do next, None when it is over and ``result`` is there."""

    step: Step | None
    result: T

    def __init__(self, operation: Operation[T]) -> None:
        self._operation = operation
        self._advance(lambda: next(operation))

    def answer(self, answer: Any) -> None:
        self._advance(lambda: self._operation.send(answer))

    def fail(self, error: QueenError) -> None:
        """Let the operation deal with a failed step; what it does not deal with is raised here."""
        self._advance(lambda: self._operation.throw(error))

    def _advance(self, resume: Callable[[], Step]) -> None:
        try:
            self.step = resume()
        except StopIteration as end:
            self.step = None
            self.result = end.value


def _function(
    call: str, columns: Iterable[str] = ("*",), *, repeatable: bool = False, writes: bool = True
) -> Statement:
    # Both parts are constants of this module.
    return Statement(f"SELECT {', '.join(columns)} FROM queen.{call}".encode(), repeatable, writes)  # noqa: S608


def _read(call: str, columns: Iterable[str] = ("*",)) -> Statement:
    return _function(call, columns, repeatable=True, writes=False)


def _names(result: type[Any], *, without: tuple[str, ...] = ()) -> list[str]:
    return [column.name for column in fields(result) if column.name not in without]


# Lists go as binary arrays (%b): 0.3 µs of client CPU an element, where the text format takes ten times that.
# A binary text is of type text, hence the casts to other types.
_CONFIGURE = _function("configure_queue(%b, %b::jsonb)", _names(QueueInfo), repeatable=True)
_DELETE_QUEUE = _function("delete_queue(%b)")
_LIST_QUEUES = _read("list_queues(%b)", _names(QueueInfo))
_ENCRYPTION = _read("list_queues() WHERE name = %b", ("encryption_enabled",))
# Every message has a transaction id: a second run stores nothing, and answers with what the first one stored.
_PUSH = _function(
    "push_batch(%b, %b, %b, %b, %b::text[]::uuid[], %b, %b)", PushedBatch._fields, repeatable=True
)
_POP = _function("pop(%b, %b, %b, %b, %b, %b, %b, %b, %b, %b, %b, %b)", Message.COLUMNS, writes=False)
_SETTLE = _function(
    "settle(%b::text[]::uuid[], %b::text[]::int8multirange[], %b::text[]::int8multirange[],"
    " %b::text[]::int8multirange[], %b::text[]::int8multirange[], %b)",
    _names(SettleResult),
)
_RENEW = _function("renew(%b::text[]::uuid[], %b)", Lease._fields, repeatable=True)
# The server's clock on both sides: ours may differ.
_NEXT_READY = _read(
    "next_ready_at(%b, %b, %b, %b, %b) AS ready_at",
    ("extract(epoch FROM ready_at - clock_timestamp())::float8",),
)
_DEPTH = _read("depth(%b, %b, %b, %b)", _names(Depth))
_STATS = _read("stats(%b)", _names(PartitionStats, without=("subscribed",)))
_SEEK = _function("seek(%b, %b, %b, %b, %b)")
_LIST_GROUPS = _read("list_consumer_groups(%b)", _names(ConsumerGroupInfo))
_DELETE_GROUP = _function("delete_consumer_group(%b, %b)")
_LIST_MESSAGES = _read("list_messages(%b, %b, %b::uuid, %b)", StoredMessage.COLUMNS)
_TRACE = _read("trace(%b::uuid)", StoredMessage.COLUMNS)
_DEAD_LETTERS = _read("list_dead_letters(%b, %b, %b, %b, %b, %b)", DeadLetter.COLUMNS)
_REQUEUE = _function("requeue_dead_letters(%b, %b, %b, %b)", Requeued._fields)
_PURGE = _function("purge_dead_letters(%b, %b, %b, %b)")
_RECLAIM = _function("reclaim(%b, %b)", repeatable=True)
_EVICT = _function("evict(%b, %b)", Evicted._fields)
_RETAIN = _function("retain(%b, %b)", Retained._fields)


class Operations:
    """Every operation of the contract, for one client.

    :param keyring: the keys for encrypted queues, or None
    :param options: the client's options
    :param clock: seconds that only grow, for waiting
    """

    def __init__(
        self,
        keyring: Keyring | None = None,
        options: ClientOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keyring = keyring
        self._options = options or ClientOptions()
        self._clock = clock
        # Whether a queue is encrypted, as last seen. The server refuses a push that got it wrong.
        self._encrypted: dict[str, bool] = {}
        self._in_transaction = False

    def in_transaction(self) -> Operations:
        """The same operations for use inside an explicit transaction, where nothing waits or is repeated."""
        twin = Operations(self._keyring, self._options, self._clock)
        twin._encrypted = self._encrypted
        twin._in_transaction = True
        return twin

    def configure_queue(self, queue_name: object, options: dict[str, object]) -> Operation[QueueInfo]:
        name = inputs.name("queue_name", queue_name)
        rows = yield Call(_CONFIGURE, (name, inputs.queue_options(options)))
        queue = QueueInfo(*rows[0])
        self._encrypted[name] = queue.encryption_enabled
        return queue

    def delete_queue(self, queue_name: object) -> Operation[bool]:
        name = inputs.name("queue_name", queue_name)
        rows = yield Call(_DELETE_QUEUE, (name,))
        self._encrypted.pop(name, None)
        return bool(rows[0][0])

    def list_queues(self, namespace: object) -> Operation[list[QueueInfo]]:
        rows = yield Call(_LIST_QUEUES, (inputs.optional_name("namespace", namespace),))
        return [QueueInfo(*row) for row in rows]

    def push(self, queue_name: object, messages: object) -> Operation[list[PushResult]]:
        name = inputs.name("queue_name", queue_name)
        batch = inputs.batch(messages)
        if not batch.payloads:
            return []
        if name not in self._encrypted:
            yield from self._look_up_encryption(name)
        try:
            rows = yield self._push_call(name, batch)
        except EncryptionChangedError:
            del self._encrypted[name]
            if self._in_transaction:  # which is aborted now
                raise
            yield from self._look_up_encryption(name)
            rows = yield self._push_call(name, batch)
        results = PushedBatch._make(rows[0]).results(batch.transaction_ids, batch.partitions)
        if any(result.status == "duplicate" for result in results):
            return [_own_first_attempt(*pair) for pair in zip(results, batch.generated, strict=True)]
        return results

    def _push_call(self, queue_name: str, batch: inputs.Batch) -> Call:
        payloads = batch.payloads
        encrypted = self._encrypted.get(queue_name, False)
        if encrypted:
            keyring = self._keyring
            if keyring is None:
                raise EncryptionError(no_key(queue_name))
            payloads = [
                keyring.encrypt(payload, queue_name, transaction_id)
                for payload, transaction_id in zip(payloads, batch.transaction_ids, strict=True)
            ]
        parameters = (
            queue_name,
            payloads,
            batch.partitions,
            batch.transaction_ids,
            batch.trace_ids,
            batch.priorities,
            encrypted,
        )
        return Call(_PUSH, parameters)

    def _look_up_encryption(self, queue_name: str) -> Operation[None]:
        """Remember whether the queue is encrypted, so that plain text is never sent to one that is."""
        rows = yield Call(_ENCRYPTION, (queue_name,))
        if rows:  # otherwise the push itself says that there is no such queue, and which is the nearest
            self._encrypted[queue_name] = rows[0][0]

    def pop(
        self,
        queue_name: object,
        *,
        partition: object,
        consumer_group: object,
        batch_size: object,
        max_partitions: object,
        lease_seconds: object,
        subscription_mode: object,
        subscription_from: object,
        wait_seconds: object,
        auto_ack: object,
        namespace: object,
        task: object,
    ) -> Operation[list[Message]]:
        selection = inputs.selection(queue_name, partition, consumer_group, namespace, task)
        mode, since = inputs.subscription(subscription_mode, subscription_from)
        sizes = (
            inputs.positive("batch_size", batch_size),
            inputs.positive("max_partitions", max_partitions),
            inputs.optional_positive("lease_seconds", lease_seconds),
        )
        acknowledge = inputs.flag("auto_ack", auto_ack)
        wait = inputs.seconds("wait_seconds", wait_seconds)
        if wait and self._in_transaction:
            raise InvalidOptionError(
                f"wait_seconds is {wait_seconds!r} inside a transaction, which would hold its locks and its"
                " snapshot all the while: wait before it begins"
            )
        # What the server acknowledges at once is gone when it does not decrypt, so only from a queue without.
        at_once = acknowledge and (yield from self._is_plain(selection.queue_name))
        parameters = (
            selection.queue_name,
            selection.partition,
            selection.consumer_group,
            *sizes,
            mode,
            since,
            at_once,
            selection.namespace,
            selection.task,
            self._in_transaction,
        )
        pop = Call(_POP, parameters)
        messages = yield from self._pop_once(pop)
        if wait and not messages:
            messages = yield from self._wait(pop, selection, self._clock() + wait)
        if acknowledge and not at_once and messages:
            yield _settle_call(inputs.settlement(completed=messages), None)
            messages = [message.without_lease() for message in messages]
        return messages

    def _is_plain(self, queue_name: str | None) -> Operation[bool]:
        if queue_name is None:
            return False
        if queue_name not in self._encrypted:
            yield from self._look_up_encryption(queue_name)
        return not self._encrypted.get(queue_name, False)

    def _pop_once(self, pop: Call) -> Operation[list[Message]]:
        rows: list[Row] = yield pop
        if not any(row[IS_ENCRYPTED] for row in rows):
            return [Message(row, row[PAYLOAD]) for row in rows]
        messages = [Message(row, self._body(row)) for row in rows]
        unreadable = [message for message in messages if isinstance(message._body, EncryptionError)]
        if unreadable:
            yield from self._give_back(messages, unreadable)
        return messages

    def _give_back(self, messages: list[Message], unreadable: list[Message]) -> Operation[None]:
        reason = str(unreadable[0]._body)
        if any(message.lease_id is None for message in messages):
            raise EncryptionError(f"{reason}; auto_ack had acknowledged it already: seek brings it back")
        with suppress(LeaseLostError):  # then it has expired, and they are given back already
            yield _settle_call(inputs.settlement(released=messages), None)
        raise EncryptionError(
            f"{reason}; {len(unreadable)} of {len(messages)} popped are unreadable, all were released"
        )

    def _body(self, row: Row) -> str | EncryptionError:
        """The payload's text, decrypted where necessary; or why that cannot be done."""
        if not row[IS_ENCRYPTED]:
            return str(row[PAYLOAD])
        queue_name: str = row[QUEUE_NAME]
        if self._keyring is None:
            return EncryptionError(no_key(queue_name))
        try:
            # A requeued message is a new one, with the payload as it was encrypted for the first.
            bound_to = row[ORIGIN_TRANSACTION_ID] or row[TRANSACTION_ID]
            return self._keyring.decrypt(row[PAYLOAD], queue_name, bound_to)
        except EncryptionError as error:
            return EncryptionError(str(error))

    def _wait(self, pop: Call, selection: inputs.Selection, deadline: float) -> Operation[list[Message]]:
        """Pop again whenever a message may have become ready, until one is there or the time is over."""
        listening = not self._options.transaction_pooler
        poll = self._options.poll_seconds if listening else _POLL_SECONDS_WITHOUT_LISTEN
        if listening:
            yield Listen(True)
        shortest = _SHORTEST_PAUSE
        while True:
            # Directly after LISTEN too: a message that came before it rang no bell for us.
            messages = yield from self._pop_once(pop)
            remaining = deadline - self._clock()
            if messages or remaining <= 0:
                break
            rows = yield Call(
                _NEXT_READY,
                (
                    selection.queue_name,
                    selection.partition,
                    selection.consumer_group,
                    selection.namespace,
                    selection.task,
                ),
            )
            ready_in = rows[0][0] if rows else None
            pause = poll if ready_in is None else min(poll, max(ready_in, shortest))
            shortest = min(poll, shortest * 2) if ready_in is not None and ready_in <= 0 else _SHORTEST_PAUSE
            yield Pause(min(pause, remaining), selection.queue_name, listening)
        if listening:
            yield Listen(False)
        return messages

    def settle(self, *, error: object, **outcomes: object) -> Operation[SettleResult]:
        settlement = inputs.settlement(**outcomes)
        if not settlement.lease_ids:
            return SettleResult()
        rows = yield _settle_call(settlement, inputs.error_text(error))
        return SettleResult(*map(sum, zip(*rows, strict=True)))

    def renew(self, messages: object, seconds: object) -> Operation[list[Lease]]:
        duration = inputs.positive("seconds", seconds)
        lease_ids = list(dict.fromkeys(message.lease_id for message in inputs.leased("messages", messages)))
        if not lease_ids:
            return []
        rows = yield Call(_RENEW, (lease_ids, duration))
        return [Lease._make(row) for row in rows]

    def depth(
        self, queue_name: object, consumer_group: object, namespace: object, task: object
    ) -> Operation[Depth]:
        selection = inputs.selection(queue_name, None, consumer_group, namespace, task)
        rows = yield Call(
            _DEPTH,
            (selection.queue_name, selection.consumer_group, selection.namespace, selection.task),
        )
        return Depth(*rows[0])

    def stats(self, queue_name: object) -> Operation[list[PartitionStats]]:
        rows = yield Call(_STATS, (inputs.optional_name("queue_name", queue_name),))
        return [_partition_stats(row) for row in rows]

    def seek(
        self, queue_name: object, consumer_group: object, to: object, partition: object
    ) -> Operation[int]:
        position, moment = inputs.seek_target(to)
        rows = yield Call(
            _SEEK,
            (
                inputs.name("queue_name", queue_name),
                inputs.optional_name("consumer_group", consumer_group),
                position,
                moment,
                inputs.optional_name("partition", partition),
            ),
        )
        return int(rows[0][0])

    def list_consumer_groups(self, queue_name: object) -> Operation[list[ConsumerGroupInfo]]:
        rows = yield Call(_LIST_GROUPS, (inputs.optional_name("queue_name", queue_name),))
        return [ConsumerGroupInfo(group_name(row[0]), *row[1:]) for row in rows]

    def delete_consumer_group(self, consumer_group: object, queue_name: object) -> Operation[int]:
        parameters = (
            inputs.optional_name("consumer_group", consumer_group),
            inputs.optional_name("queue_name", queue_name),
        )
        rows = yield Call(_DELETE_GROUP, parameters)
        return int(rows[0][0])

    def list_messages(
        self, queue_name: object, partition: object, after: object, limit: object
    ) -> Operation[list[StoredMessage]]:
        rows = yield Call(
            _LIST_MESSAGES,
            (
                inputs.name("queue_name", queue_name),
                inputs.optional_name("partition", partition),
                inputs.page_after_message(after),
                inputs.positive("limit", limit),
            ),
        )
        return [StoredMessage(row, self._body(row)) for row in rows]

    def trace(self, trace_id: object) -> Operation[list[StoredMessage]]:
        rows = yield Call(_TRACE, (inputs.uuid("trace_id", trace_id),))
        return [StoredMessage(row, self._body(row)) for row in rows]

    def dead_letters(
        self,
        queue_name: object,
        *,
        consumer_group: object,
        partition: object,
        after: object,
        limit: object,
        include_requeued: object,
    ) -> Operation[list[DeadLetter]]:
        rows = yield Call(
            _DEAD_LETTERS,
            (
                inputs.name("queue_name", queue_name),
                inputs.optional_name("consumer_group", consumer_group),
                inputs.optional_name("partition", partition),
                inputs.page_after_dead_letter(after),
                inputs.positive("limit", limit),
                inputs.flag("include_requeued", include_requeued),
            ),
        )
        return [DeadLetter(row, self._body(row)) for row in rows]

    def requeue_dead_letters(
        self, queue_name: object, ids: object, consumer_group: object, limit: object
    ) -> Operation[list[Requeued]]:
        numbers = inputs.dead_letter_ids(ids)
        parameters = (
            inputs.name("queue_name", queue_name),
            numbers,
            inputs.optional_name("consumer_group", consumer_group),
            inputs.positive("limit", limit),
        )
        if numbers == []:
            return []
        rows = yield Call(_REQUEUE, parameters)
        return [Requeued._make(row) for row in rows]

    def purge_dead_letters(
        self, queue_name: object, ids: object, consumer_group: object, older_than_seconds: object
    ) -> Operation[int]:
        numbers = inputs.dead_letter_ids(ids)
        age = (
            None
            if older_than_seconds is None
            else inputs.not_negative("older_than_seconds", older_than_seconds)
        )
        parameters = (
            inputs.name("queue_name", queue_name),
            numbers,
            inputs.optional_name("consumer_group", consumer_group),
            age,
        )
        if numbers == []:
            return 0
        rows = yield Call(_PURGE, parameters)
        return int(rows[0][0])

    def reclaim(self, queue_name: object, limit: object) -> Operation[int]:
        rows = yield Call(_RECLAIM, _maintained(queue_name, limit))
        return int(rows[0][0])

    def evict(self, queue_name: object, limit: object) -> Operation[list[Evicted]]:
        rows = yield Call(_EVICT, _maintained(queue_name, limit))
        return [Evicted(queue, group_name(group), evicted) for queue, group, evicted in rows]

    def retain(self, queue_name: object, limit: object) -> Operation[list[Retained]]:
        rows = yield Call(_RETAIN, _maintained(queue_name, limit))
        return [Retained._make(row) for row in rows]


def _maintained(queue_name: object, limit: object) -> tuple[object, ...]:
    return inputs.optional_name("queue_name", queue_name), inputs.positive("limit", limit)


def _partition_stats(row: Row) -> PartitionStats:
    stored = PartitionStats(*row)
    group = stored.consumer_group
    return replace(stored, consumer_group=group_name(group), subscribed=group is not None)


def _settle_call(settlement: inputs.Settlement, error: str | None) -> Call:
    return Call(
        _SETTLE,
        (
            settlement.lease_ids,
            settlement.completed,
            settlement.failed,
            settlement.rejected,
            settlement.released,
            error,
        ),
    )


def _own_first_attempt(result: PushResult, generated: bool) -> PushResult:
    # Nobody else knows an id that we made up: the first attempt stored it, and its answer was lost.
    return result._replace(status="queued") if generated else result
