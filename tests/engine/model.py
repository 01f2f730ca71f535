"""The queue in plain Python: what the contract says, without a database.

Everything is kept the obvious way: a lane is a list of messages, a reader (a group on a lane) a set of the
seqs it has settled, and its backlog is what a loop over the list finds. There are no cursors, no indexes and
no wake-ups, so that whatever the engine does to be fast has something slow to be compared with.

Calls change the model and return what the engine must answer, or raise :class:`Refused` and change nothing.
Three things the engine may choose, so :meth:`Model.pop` is told what it chose and checks that it might:

- which of several lanes of the same priority a pop takes;
- when a lease that has run out is ended: by the next pop that meets the lane, or by a job;
- when a message that waited too long is evicted, as long as nobody gets it.

Time is a number of seconds. Every call takes a moment of it; :meth:`Model.advance` lets more pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

QUEUE_MODE = "__QUEUE_MODE__"
LONGEST_BACKOFF = 300.0
MOMENT = 0.001

NOT_FOUND, FULL, LEASE_LOST, INVALID = "QN001", "QN002", "QN003", "QN004"


class Refused(Exception):
    """The engine must raise this SQLSTATE, and change nothing."""

    def __init__(self, sqlstate: str) -> None:
        super().__init__(sqlstate)
        self.sqlstate = sqlstate


@dataclass(frozen=True, order=True)
class LaneKey:
    queue: str
    partition: str
    priority: int


@dataclass
class Queue:
    """A queue and its options, by the contract's names."""

    name: str
    namespace: str | None = None
    task: str | None = None
    priority: int = 0
    lease_time: int = 300
    retry_limit: int = 3
    retry_delay: int = 1000
    dlq_after_max_retries: bool = True
    delayed_processing: int = 0
    window_buffer: int = 0
    max_wait_time_seconds: int = 0
    max_queue_size: int = 0
    retention_enabled: bool = False
    retention_seconds: int = 0
    completed_retention_seconds: int = 0


@dataclass(frozen=True)
class Message:
    seq: int
    created_at: float
    transaction_id: str
    payload: int


@dataclass
class Lane:
    key: LaneKey
    created_at: float
    floor: int = 0  # the highest seq that retention removed
    messages: list[Message] = field(default_factory=list)  # the retained ones: floor + 1, floor + 2, ...

    @property
    def last_seq(self) -> int:
        return self.messages[-1].seq if self.messages else self.floor

    def message(self, seq: int) -> Message | None:
        return next((m for m in self.messages if m.seq == seq), None)

    def last_before(self, moment: float) -> int:
        return max((m.seq for m in self.messages if m.created_at < moment), default=self.floor)


@dataclass
class Lease:
    """What a pop gave out; ``held`` shrinks as messages are settled."""

    id: object
    expires_at: float
    seqs: list[int]
    attempt: int
    held: set[int] = field(default_factory=set)
    completed: int = 0
    failed: int = 0
    rejected: int = 0
    released: int = 0


@dataclass
class Reader:
    """A group on a lane that it has met."""

    lane: Lane
    group: str
    settled: set[int]
    failures: dict[int, int] = field(default_factory=dict)
    errors: dict[int, str | None] = field(default_factory=dict)
    suspect_through: int = 0  # messages up to here were together in a lease that ran out: one at a time now
    retry_at: float = -math.inf
    lease: Lease | None = None
    completed: int = 0
    dropped: int = 0

    @property
    def pending(self) -> list[Message]:
        return [m for m in self.lane.messages if m.seq not in self.settled]

    def forget(self, seqs: Iterable[int]) -> None:
        """These are settled for good."""
        for seq in seqs:
            self.settled.add(seq)
            self.failures.pop(seq, None)
            self.errors.pop(seq, None)


@dataclass(frozen=True, order=True)
class Scope:
    """What a pop names: a queue, one of its partitions, or all queues of a namespace and/or task."""

    queue: str | None = None
    partition: str | None = None
    namespace: str | None = None
    task: str | None = None

    def covers(self, queue: Queue, partition: str | None) -> bool:
        return (
            self.queue in (None, queue.name)
            and self.partition in (None, partition)
            and self.namespace in (None, queue.namespace)
            and self.task in (None, queue.task)
        )

    @property
    def precision(self) -> tuple[bool, bool, bool, bool]:
        return (
            self.partition is not None,
            self.queue is not None,
            None not in (self.namespace, self.task),
            self.namespace is not None,
        )


@dataclass(frozen=True)
class Subscription:
    mode: str
    begins_at: float
    created_at: float

    def start(self, lane: Lane) -> int:
        """The seq after which the group begins to read a lane."""
        appeared_later = lane.created_at > self.created_at
        if self.mode == "all" or (appeared_later and self.begins_at <= self.created_at):
            return lane.floor
        return lane.last_before(self.begins_at)


@dataclass
class DeadLetter:
    lane: LaneKey
    seq: int
    group: str
    reason: str
    error: str | None
    retry_count: int
    payload: int
    id: int | None = None  # the database's
    requeued_as: int | None = None


@dataclass(frozen=True)
class Delivery:
    """A lease that ended."""

    lane: LaneKey
    group: str
    first_seq: int
    last_seq: int
    attempt: int
    completed: int = 0
    failed: int = 0
    rejected: int = 0
    released: int = 0
    expired: int = 0


@dataclass(frozen=True)
class Pushed:
    status: str
    transaction_id: str | None  # None: the engine makes one up
    partition: str
    seq: int
    priority: int


@dataclass(frozen=True)
class Popped:
    """One message as a pop returned it; ``lease_id`` is None with ``auto_ack``."""

    lane: LaneKey
    seq: int
    payload: int
    attempt: int
    lease_id: object


@dataclass(frozen=True)
class Outcome:
    completed: int
    retried: int
    dead_lettered: int
    dropped: int
    released: int
    remaining: int


@dataclass(frozen=True)
class Settling:
    """One lease's part of a settlement."""

    lease_id: object
    completed: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    rejected: frozenset[int] = frozenset()
    released: frozenset[int] = frozenset()

    @property
    def named(self) -> frozenset[int]:
        return self.completed | self.failed | self.rejected | self.released


class Model:
    def __init__(self) -> None:
        self.now = 0.0
        self.queues: dict[str, Queue] = {}
        self.lanes: dict[LaneKey, Lane] = {}
        self.groups: set[tuple[str, str]] = set()  # (queue, group): it came to the queue
        self.readers: dict[tuple[LaneKey, str], Reader] = {}
        self.subscriptions: dict[tuple[str, Scope], Subscription] = {}
        self.dead_letters: list[DeadLetter] = []
        self.deliveries: list[Delivery] = []

    # Time

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def _tick(self) -> None:
        self.now += MOMENT

    # Queues

    def configure(self, name: str, **options: object) -> None:
        self._tick()
        self.queues[name] = replace(self.queues.get(name, Queue(name)), **options)  # type: ignore[arg-type]

    def lanes_of(self, queue: str, partition: str | None = None) -> list[Lane]:
        return [
            lane
            for key, lane in self.lanes.items()
            if key.queue == queue and partition in (None, key.partition)
        ]

    # Push

    def push(self, queue: str, messages: list[tuple[str, int, str | None, int]]) -> list[Pushed]:
        """Messages are (partition, priority, transaction id, payload)."""
        self._tick()
        results = []
        new: dict[LaneKey, list[Message]] = {LaneKey(queue, p, r): [] for p, r, _, _ in messages}
        for partition, priority, transaction_id, payload in messages:
            key = LaneKey(queue, partition, priority)
            first = self._find(queue, partition, transaction_id, new)
            if first is not None:
                results.append(Pushed("duplicate", transaction_id, partition, first[1], first[0].priority))
                continue
            seq = (self.lanes[key].last_seq if key in self.lanes else 0) + len(new[key]) + 1
            new[key].append(Message(seq, self.now, transaction_id or f"made-up-{payload}", payload))
            results.append(Pushed("queued", transaction_id, partition, seq, priority))
        count = sum(len(added) for added in new.values())
        limit = self.queues[queue].max_queue_size
        if limit and count and self.fullness(queue) + count > limit:
            raise Refused(FULL)
        for key, added in new.items():
            self.lanes.setdefault(key, Lane(key, self.now)).messages.extend(added)
        return results

    def _find(
        self, queue: str, partition: str, transaction_id: str | None, new: dict[LaneKey, list[Message]]
    ) -> tuple[LaneKey, int] | None:
        """The retained message of a partition with this transaction id, whatever its priority."""
        for lane in self.lanes_of(queue, partition):
            for message in lane.messages:
                if message.transaction_id == transaction_id:
                    return lane.key, message.seq
        for key, added in new.items():
            for message in added:
                if key.partition == partition and message.transaction_id == transaction_id:
                    return key, message.seq
        return None

    def fullness(self, queue: str) -> int:
        """What the slowest group has not settled; every retained message where no group exists."""
        groups = self.groups_of(queue)
        if not groups:
            return sum(len(lane.messages) for lane in self.lanes_of(queue))
        return max(self.pending(queue, group) for group in groups)

    # Subscriptions

    def groups_of(self, queue: str) -> set[str]:
        """The groups that exist for a queue: those that came to it, and those of its namespace or task."""
        of_all = {
            group
            for group, scope in self.subscriptions
            if scope.queue is None and scope.covers(self.queues[queue], None)
        }
        return of_all | {group for name, group in self.groups if name == queue}

    def subscription(self, group: str, queue: Queue, partition: str | None) -> Subscription | None:
        """The most specific record that holds for a partition."""
        found = [
            (scope.precision, subscription)
            for (name, scope), subscription in self.subscriptions.items()
            if name == group and scope.covers(queue, partition)
        ]
        return max(found, key=lambda f: f[0])[1] if found else None

    def start(self, group: str, lane: Lane) -> int:
        subscription = self.subscription(group, self.queues[lane.key.queue], lane.key.partition)
        return subscription.start(lane) if subscription else lane.floor

    def scoped_queues(self, scope: Scope) -> list[Queue]:
        """In the order in which a pop looks at them."""
        found = [q for q in self.queues.values() if replace(scope, partition=None).covers(q, None)]
        return sorted(found, key=lambda q: (-q.priority, q.name))

    def meet(self, group: str, scope: Scope, mode: str, begins_at: float = -math.inf) -> None:
        """The group comes to a scope: the first time its mode is recorded, and it meets every lane there."""
        begins_at = {"all": -math.inf, "new": self.now}.get(mode, begins_at)
        self.subscriptions.setdefault((group, scope), Subscription(mode, begins_at, self.now))
        for queue in self.scoped_queues(scope):
            self.groups.add((queue.name, group))
            for lane in self.lanes_of(queue.name, scope.partition):
                self._meet_lane(group, lane)

    def _meet_lane(self, group: str, lane: Lane) -> None:
        if (lane.key, group) not in self.readers:
            self.readers[lane.key, group] = Reader(lane, group, set(range(1, self.start(group, lane) + 1)))

    # Pop

    def pop(
        self,
        scope: Scope,
        group: str,
        popped: list[Popped],
        *,
        expired: list[LaneKey],
        evicted: list[tuple[LaneKey, int]],
        batch_size: int,
        max_partitions: int = 1,
        lease_seconds: int | None = None,
        mode: str = "all",
        begins_at: float = -math.inf,
        auto_ack: bool = False,
    ) -> None:
        """Check what a pop returned, which leases it ended and what it evicted; then it holds here too."""
        self._tick()
        self.meet(group, scope, mode, begins_at)
        for lane in expired:
            self.expire(lane, group)
        self._evict(group, evicted)

        # Queues by priority, then messages by priority: within a rank any lane may come.
        queues = [queue.name for queue in self.scoped_queues(scope)]
        ready: dict[LaneKey, list[Message]] = {}
        for reader in self._scoped_readers(scope, group):
            messages = self.deliverable(reader)
            if messages:
                ready[reader.lane.key] = messages
        ranks = {key: (queues.index(key.queue), -key.priority) for key in ready}

        budget = batch_size
        taken: list[LaneKey] = []
        while popped:
            key, lease_id = popped[0].lane, popped[0].lease_id
            batch = [p for p in popped if p.lane == key]
            assert popped[: len(batch)] == batch, f"the messages of {key} are not together"
            popped = popped[len(batch) :]
            assert key in ready, f"{key} had nothing to deliver, or may not yet"
            assert not taken or ranks[taken[-1]] <= ranks[key], (
                f"{key} came after {taken[-1]}, of a lower rank"
            )
            reader = self.readers[key, group]
            expected = ready.pop(key)[: 1 if self.is_suspect(reader) else budget]
            assert [(p.seq, p.payload) for p in batch] == [(m.seq, m.payload) for m in expected]
            assert [p.attempt for p in batch] == [reader.failures.get(m.seq, 0) + 1 for m in expected]
            budget -= len(expected)
            taken.append(key)
            self._lend(reader, [m.seq for m in expected], lease_id, lease_seconds, auto_ack)
        assert budget >= 0
        assert len(taken) <= max_partitions
        worst = max((ranks[key] for key in taken), default=(-1, 0))
        for key in ready:
            if budget and len(taken) < max_partitions:
                raise AssertionError(f"{key} was ready and was left out: {ready[key]}")
            assert ranks[key] >= worst, f"{key} was left out for {taken}, of a lower rank"

    def _scoped_readers(self, scope: Scope, group: str) -> Iterator[Reader]:
        for queue in self.scoped_queues(scope):
            for lane in self.lanes_of(queue.name, scope.partition):
                if (lane.key, group) in self.readers:
                    yield self.readers[lane.key, group]

    def deliverable(self, reader: Reader) -> list[Message]:
        """What a pop could get of this lane now, given any batch size, leases that ran out being ended."""
        queue = self.queues[reader.lane.key.queue]
        if self.is_leased(reader) or reader.retry_at > self.now or not reader.pending:
            return []
        if queue.window_buffer and reader.lane.messages[-1].created_at + queue.window_buffer > self.now:
            return []
        due = [m for m in reader.pending if m.created_at + queue.delayed_processing <= self.now]
        return [m for m in due if not self._is_stale(queue, m)]

    def is_leased(self, reader: Reader) -> bool:
        return reader.lease is not None and reader.lease.expires_at > self.now

    def is_suspect(self, reader: Reader) -> bool:
        return bool(reader.pending) and reader.pending[0].seq <= reader.suspect_through

    def _is_stale(self, queue: Queue, message: Message) -> bool:
        return 0 < queue.max_wait_time_seconds < self.now - message.created_at

    def _lend(
        self, reader: Reader, seqs: list[int], lease_id: object, lease_seconds: int | None, auto_ack: bool
    ) -> None:
        assert reader.lease is None, "a lease that ran out was taken over without being ended"
        attempt = max(reader.failures.get(seq, 0) for seq in seqs) + 1
        reader.retry_at = -math.inf
        if auto_ack:
            assert lease_id is None
            reader.forget(seqs)
            reader.completed += len(seqs)
            self._ended(reader, Lease(None, 0, seqs, attempt, completed=len(seqs)))
            return
        seconds = lease_seconds or self.queues[reader.lane.key.queue].lease_time
        reader.lease = Lease(lease_id, self.now + seconds, seqs, attempt, held=set(seqs))

    def _ended(self, reader: Reader, lease: Lease, expired: int = 0) -> None:
        self.deliveries.append(
            Delivery(
                reader.lane.key, reader.group, lease.seqs[0], lease.seqs[-1], lease.attempt,
                lease.completed, lease.failed, lease.rejected, lease.released, expired,
            )
        )  # fmt: skip
        reader.lease = None

    # Leases

    def reader_of(self, lease_id: object) -> Reader | None:
        """Who holds this lease, run out or not, as long as nobody took over."""
        return next((r for r in self.readers.values() if r.lease and r.lease.id == lease_id), None)

    def expire(self, lane: LaneKey, group: str) -> None:
        """A lease that ran out ends: each message it held has failed once more, and one alone is to blame."""
        reader = self.readers[lane, group]
        lease = reader.lease
        assert lease is not None, f"{lane} has no lease to end"
        assert lease.expires_at <= self.now, f"the lease on {lane} was live"
        held = sorted(
            seq for seq in lease.held if seq > reader.lane.floor
        )  # retention does not wait for the dead
        exhausted = self._fail(reader, held, f"the lease of attempt {lease.attempt} ran out")
        if len(lease.held) == 1 and exhausted:
            self._give_up(reader, exhausted, "expired", None)
        reader.suspect_through = max(reader.suspect_through, *held[-1:], 0)
        self._ended(reader, lease, expired=len(lease.held))

    def _fail(self, reader: Reader, seqs: Iterable[int], error: str | None) -> list[int]:
        """Count a failure for each; return those that have used up their retries."""
        for seq in seqs:
            reader.failures[seq] = reader.failures.get(seq, 0) + 1
            reader.errors[seq] = error if error is not None else reader.errors.get(seq)
        limit = self.queues[reader.lane.key.queue].retry_limit
        return [seq for seq in seqs if reader.failures[seq] > limit]

    def _give_up(self, reader: Reader, seqs: list[int], reason: str, error: str | None) -> int:
        """Out of retries: to the dead letters, or dropped and counted. Returns how many were buried."""
        if self.queues[reader.lane.key.queue].dlq_after_max_retries:
            return self._bury(reader, seqs, reason, error)
        reader.dropped += len(seqs)
        reader.forget(seqs)
        return 0

    def _bury(self, reader: Reader, seqs: Iterable[int], reason: str, error: str | None) -> int:
        buried = 0
        for seq in sorted(seqs):
            message = reader.lane.message(seq)
            if message is not None:  # retention may have taken it from a lease that had run out
                redeliveries = reader.failures.get(seq, 0) - (reason in ("failed", "expired"))
                text = error if error is not None else reader.errors.get(seq)
                self.dead_letters.append(
                    DeadLetter(
                        reader.lane.key,
                        seq,
                        reader.group,
                        reason,
                        text,
                        max(redeliveries, 0),
                        message.payload,
                    )
                )
                buried += 1
        reader.forget(seqs)
        return buried

    def settle(self, settlings: list[Settling], error: str | None = None) -> list[Outcome]:
        self._tick()
        for settling in settlings:
            reader = self.reader_of(settling.lease_id)
            if reader is None or reader.lease is None or not settling.named <= reader.lease.held:
                raise Refused(LEASE_LOST)
        return [self._settle(settling, error) for settling in settlings if settling.named]

    def _settle(self, settling: Settling, error: str | None) -> Outcome:
        reader = self.reader_of(settling.lease_id)
        assert reader is not None
        lease = reader.lease
        assert lease is not None
        dropped_before = reader.dropped
        failed = {
            seq for seq in settling.failed if seq > reader.lane.floor
        }  # of a lease that ran out, some may be gone
        exhausted = self._fail(reader, failed, error)
        retried = failed - set(exhausted)
        if retried:
            delay = self.queues[reader.lane.key.queue].retry_delay / 1000
            tried = max(reader.failures[seq] for seq in retried)
            reader.retry_at = max(reader.retry_at, self.now + min(delay * 2 ** (tried - 1), LONGEST_BACKOFF))
        dead = self._give_up(reader, exhausted, "failed", error)
        dead += self._bury(reader, settling.rejected, "rejected", error)
        reader.forget(settling.completed)
        reader.completed += len(settling.completed)
        lease.held -= settling.named
        lease.completed += len(settling.completed)
        lease.failed += len(settling.failed)
        lease.rejected += len(settling.rejected)
        lease.released += len(settling.released)
        if not lease.held:
            self._ended(reader, lease)
        return Outcome(
            completed=len(settling.completed),
            retried=len(retried),
            dead_lettered=dead,
            dropped=reader.dropped - dropped_before,
            released=len(settling.released),
            remaining=len(lease.held),
        )

    def renew(self, lease_ids: list[object], seconds: int) -> None:
        self._tick()
        readers = [self.reader_of(lease_id) for lease_id in lease_ids]
        if None in readers:
            raise Refused(LEASE_LOST)
        for reader in readers:
            assert reader is not None
            assert reader.lease is not None
            reader.lease.expires_at = self.now + seconds

    # Depth

    def backlog(self, group: str, lane: Lane) -> list[Message]:
        if (lane.key, group) in self.readers:
            return self.readers[lane.key, group].pending
        start = self.start(group, lane)
        return [m for m in lane.messages if m.seq > start]

    def pending(self, queue: str, group: str) -> int:
        return sum(len(self.backlog(group, lane)) for lane in self.lanes_of(queue))

    def in_flight(self, queue: str, group: str) -> int:
        return sum(
            len([seq for seq in reader.lease.held if seq > reader.lane.floor])
            for (key, name), reader in self.readers.items()
            if key.queue == queue and name == group and reader.lease and self.is_leased(reader)
        )

    def oldest_age(self, queue: str, group: str) -> float | None:
        times = [m.created_at for lane in self.lanes_of(queue) for m in self.backlog(group, lane)]
        return self.now - min(times) if times else None

    def waiting_dead_letters(self, queue: str, group: str) -> list[DeadLetter]:
        return [
            d
            for d in self.dead_letters
            if d.lane.queue == queue and d.group == group and d.requeued_as is None
        ]

    # Groups

    def seek(self, queue: str, group: str, to: str | float, partition: str | None = None) -> int:
        """``to``: "beginning", "end" or a time."""
        self._tick()
        lanes = self.lanes_of(queue, partition)
        if partition is not None and not lanes:
            raise Refused(INVALID)
        self.meet(group, Scope(queue, partition), "all")
        for lane in lanes:
            old = self.readers[lane.key, group]
            if old.lease is not None:
                old.lease.released += len(old.lease.held)
                self._ended(old, old.lease)
            position = (
                {"beginning": lane.floor, "end": lane.last_seq}.get(to) if isinstance(to, str) else None
            )
            if position is None:
                assert not isinstance(to, str)
                position = lane.last_before(to)
            self.readers[lane.key, group] = Reader(
                lane, group, set(range(1, position + 1)), completed=old.completed, dropped=old.dropped
            )
        return len(lanes)

    def delete_group(self, group: str, queue: str | None = None) -> int:
        self._tick()
        gone = {name for name, other in self.groups if other == group and queue in (None, name)}
        self.groups -= {(name, group) for name in gone}
        for key, name in list(self.readers):
            if name == group and queue in (None, key.queue):
                del self.readers[key, name]
        for name, scope in list(self.subscriptions):
            if name == group and (queue is None or scope.queue == queue):
                del self.subscriptions[name, scope]
        return len(gone)

    # Dead letters

    def requeue(
        self, queue: str, ids: list[int] | None = None, group: str | None = None, max_rows: int = 1000
    ) -> list[tuple[int, str, int]]:
        """(id, partition, new seq). They go to the group that gave up; the others count them as settled."""
        self._tick()
        known = sorted((d for d in self.dead_letters if d.lane.queue == queue), key=lambda d: d.id or 0)
        if ids is not None and not {d.id for d in known}.issuperset(ids):
            raise Refused(INVALID)
        chosen = [
            d
            for d in known
            if (d.requeued_as is None if ids is None else d.id in ids) and group in (None, d.group)
        ]
        if ids is None:
            chosen = chosen[:max_rows]
        todo = [d for d in chosen if d.requeued_as is None]
        results = self.push(queue, [(d.lane.partition, d.lane.priority, None, d.payload) for d in todo])
        if chosen:
            self.groups |= {(queue, name) for name in self.groups_of(queue)}
        for letter, result in zip(todo, results, strict=True):
            assert result.status == "queued"
            letter.requeued_as = result.seq
            for name in self.groups_of(queue):
                self._meet_lane(name, self.lanes[letter.lane])
            for (lane, name), reader in self.readers.items():
                if lane == letter.lane and name != letter.group:
                    reader.settled.add(result.seq)
        return [(d.id or 0, d.lane.partition, d.requeued_as or 0) for d in chosen]

    def purge(self, queue: str, ids: list[int] | None = None, group: str | None = None) -> int:
        self._tick()
        gone = [
            d
            for d in self.dead_letters
            if d.lane.queue == queue and (ids is None or d.id in ids) and group in (None, d.group)
        ]
        self.dead_letters = [d for d in self.dead_letters if d not in gone]
        return len(gone)

    # Jobs

    def reclaim(self, queue: str) -> int:
        self._tick()
        overdue = [
            reader
            for (key, _), reader in self.readers.items()
            if key.queue == queue and reader.lease and not self.is_leased(reader)
        ]
        for reader in overdue:
            self.expire(reader.lane.key, reader.group)
        return len(overdue)

    def evict(
        self,
        queue: str,
        expired: list[tuple[LaneKey, str]],
        evicted: list[tuple[LaneKey, str, int]],
        max_rows: int,
    ) -> dict[str, int]:
        """Check which leases an eviction ended and what it moved; return how many of each group."""
        self._tick()
        options = self.queues[queue]
        groups = self.groups_of(queue)
        assert options.max_wait_time_seconds or not (expired or evicted)
        if not options.max_wait_time_seconds:
            return {}
        for group in groups:
            if self.subscription(group, options, None) is not None:
                self.groups.add((queue, group))
                for lane in self.lanes_of(queue):
                    self._meet_lane(group, lane)
        for lane_key, group in expired:
            self.expire(lane_key, group)
        for group in {group for _, group, _ in evicted}:
            self._evict(group, [(lane, seq) for lane, other, seq in evicted if other == group])
        assert len(evicted) <= max_rows
        if len(evicted) < max_rows:
            for (key, _), reader in self.readers.items():
                if key.queue == queue and not self.is_leased(reader):
                    assert not any(self._is_stale(options, m) for m in reader.pending), (
                        f"{key}: not all evicted"
                    )
        return {g: n for g in groups if (n := len([1 for _, other, _ in evicted if other == g]))}

    def _evict(self, group: str, evicted: list[tuple[LaneKey, int]]) -> None:
        for key in {key for key, _ in evicted}:
            reader = self.readers[key, group]
            seqs = [seq for lane, seq in evicted if lane == key]
            assert reader.lease is None, f"{key} was evicted under a lease"
            head = reader.pending[: len(seqs)]
            assert seqs == [m.seq for m in head], f"{key}: {seqs} were not the next ones"
            assert all(self._is_stale(self.queues[key.queue], m) for m in head)
            self._bury(reader, seqs, "evicted", "waited longer than max_wait_time_seconds")

    def retain(self, queue: str, max_rows: int = 10000) -> list[tuple[str, str, int]]:
        """(partition, rule, messages deleted): a prefix of each lane."""
        self._tick()
        options = self.queues[queue]
        if not options.retention_enabled:
            return []
        answer = []
        for lane in self.lanes_of(queue):
            through, rule = self._deletable(options, lane)
            through = min(through, lane.floor + max_rows)
            deleted = through - lane.floor
            if deleted > 0:
                lane.messages = lane.messages[deleted:]
                lane.floor = through
                for group in (g for key, g in self.readers if key == lane.key):
                    reader = self.readers[lane.key, group]
                    reader.forget([seq for seq in reader.failures if seq <= through])
                max_rows -= deleted
                answer.append((lane.key.partition, rule, deleted))
        return answer

    def _deletable(self, queue: Queue, lane: Lane) -> tuple[int, str]:
        through, rule = lane.floor, ""
        readers = [self.readers.get((lane.key, group)) for group in self.groups_of(queue.name)]
        if queue.completed_retention_seconds and readers and None not in readers:
            unsettled = [m.seq for r in readers if r for m in r.pending]
            settled = min(unsettled, default=lane.last_seq + 1) - 1
            old = lane.last_before(self.now - queue.completed_retention_seconds)
            if min(settled, old) > through:
                through, rule = min(settled, old), "completed"
        if queue.retention_seconds:
            old = lane.last_before(self.now - queue.retention_seconds)
            held = [seq for r in readers if r and r.lease and self.is_leased(r) for seq in r.lease.held]
            old = min(old, min(held, default=old + 1) - 1)
            if old > through:
                through, rule = old, "retention"
        return through, rule
