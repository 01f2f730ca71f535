"""One task's work on a queue: pop, process, settle, and give back what is left however it ends."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from airflow_provider_queen.client import Message, Transaction, inputs
from airflow_provider_queen.exceptions import LeaseLostError, QueenError
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.operators._leases import LeaseKeeper, LeaseMemory
from airflow_provider_queen.operators._messages import derived_id, to_message, with_defaults

log = logging.getLogger(__name__)

MAX_ERROR_LENGTH = 1000
# How long results wait to be settled together: what a crash may cause to be processed again.
SETTLE_INTERVAL_SECONDS = 5.0
_LISTED_FAILURES = 20
_KILLED = "the task was killed; the messages that it held were given back"

Handler: TypeAlias = Callable[[list[Message]], Any]
"""Processes messages that succeed or fail together, and returns what to forward."""


@dataclass(slots=True)
class Outcome:
    """What became of messages that were processed together."""

    messages: list[Message]
    forwards: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None


@dataclass(slots=True)
class Tally:
    """What a task did; nothing of any payload."""

    popped: int = 0
    completed: int = 0
    failed: int = 0
    """Failed to be processed: to be redelivered, or dead letters by now."""
    released: int = 0
    forwarded: int = 0
    leases_lost: int = 0
    """Messages whose lease another consumer had taken over: they are that one's now."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """The first of those that failed."""
    queue_names: set[str] = field(default_factory=set)


class Consumer:
    """Pops batches and works through them.

    :param hook: for everything but renewals
    :param pop: arguments of ``hook.pop`` but ``batch_size`` and ``wait_seconds``
    :param handler: called with messages; what it raises is the failure of these
    :param together: call the handler with as many as were popped, instead of one at a time
    :param forward_to: the queue that gets what the handler returns, in the same transaction
    """

    def __init__(
        self,
        hook: QueenHook,
        keeper: LeaseKeeper,
        memory: LeaseMemory,
        *,
        pop: Mapping[str, Any],
        handler: Handler,
        together: bool,
        forward_to: str | None,
    ) -> None:
        self.tally = Tally()
        self._hook = hook
        self._keeper = keeper
        self._memory = memory
        self._pop_arguments = pop
        self._handler = handler
        self._together = together
        self._forward_to = forward_to
        self._held: dict[tuple[str | None, int], Message] = {}
        self._thread = threading.get_ident()
        self._killed = False

    def run(self, max_messages: int | None, batch_size: int, wait_seconds: float) -> None:
        """Work until nothing is ready, or ``max_messages`` were popped."""
        while max_messages is None or self.tally.popped < max_messages:
            size = batch_size if max_messages is None else min(batch_size, max_messages - self.tally.popped)
            if not self.run_once(size, 0 if self.tally.popped else wait_seconds):
                break

    def run_once(self, batch_size: int, wait_seconds: float) -> bool:
        """Work on one batch; returns whether there was one."""
        messages = self._pop(batch_size, wait_seconds)
        self._work_through(messages)
        return bool(messages)

    def collect(
        self, max_messages: int, batch_size: int, wait_seconds: float, fits: Callable[[Message], bool]
    ) -> list[Message]:
        """Pop and acknowledge messages as long as each one fits; the first that does not is given back."""
        collected: list[Message] = []
        while len(collected) < max_messages:
            messages = self._pop(
                min(batch_size, max_messages - len(collected)), 0 if collected else wait_seconds
            )
            fitting = messages[: next((n for n, one in enumerate(messages) if not fits(one)), len(messages))]
            if fitting:
                self._settle([Outcome(fitting)])
                collected += fitting
            if not messages or len(fitting) < len(messages):
                break
        return collected

    def kill(self) -> None:
        """End the work, from a signal handler or from another thread; what is held is given back."""
        if self._killed:
            return
        self._killed = True
        if threading.get_ident() == self._thread:
            # Out of the callable, so that it does not go on with messages that others may get now.
            raise SystemExit(_KILLED)
        self.give_back()

    def give_back(self) -> None:
        """Release whatever is still held."""
        for messages in _by_lease(list(self._held.values())):
            try:
                self.tally.released += self._release(messages)
            except QueenError as error:
                log.warning("%s messages stay leased until the lease runs out: %s", len(messages), error)
        self._held.clear()
        self._keeper.hold(())

    def _release(self, messages: list[Message]) -> int:
        """Release messages of one lease; those that it still holds, should some be settled already."""
        with suppress(LeaseLostError):
            return self._hook.release(messages).released
        # All or none. Perhaps a settlement was interrupted after the database had committed it.
        released = 0
        with suppress(LeaseLostError):
            self._hook.renew(messages)
            for message in messages:
                with suppress(LeaseLostError):
                    released += self._hook.release(message).released
        return released

    def _pop(self, size: int, wait_seconds: float) -> list[Message]:
        messages = self._hook.pop(batch_size=size, wait_seconds=wait_seconds, **self._pop_arguments)
        self._held = {(message.lease_id, message.seq): message for message in messages}
        if messages:
            self._keeper.hold(messages)
            self._memory.remember(messages)
            self.tally.popped += len(messages)
            self.tally.queue_names |= {message.queue_name for message in messages}
        return messages

    def _work_through(self, messages: list[Message]) -> None:
        outcomes: list[Outcome] = []
        settle_at = time.monotonic() + SETTLE_INTERVAL_SECONDS
        for part in self._parts(messages):
            try:
                outcomes.append(self._process(part))
            except BaseException as error:
                # A time-out and the like may be this message's doing, and count; being killed is not.
                if not self._killed and not isinstance(error, KeyboardInterrupt):
                    outcomes.append(Outcome(part, error=error_text(error, part)))
                self._settle_last(outcomes)
                raise
            if self._killed:
                self._settle_last(outcomes)
                raise SystemExit(_KILLED)
            if time.monotonic() >= settle_at:
                self._settle(outcomes)
                outcomes = []
                settle_at = time.monotonic() + SETTLE_INTERVAL_SECONDS
        self._settle(outcomes)

    def _parts(self, messages: list[Message]) -> Iterator[list[Message]]:
        """Messages to process together. One that failed before comes alone: it cannot fail others again."""
        part: list[Message] = []
        for message in messages:
            if self._together and message.attempt == 1:
                part.append(message)
                continue
            if part:
                yield part
                part = []
            yield [message]
        if part:
            yield part

    def _process(self, part: list[Message]) -> Outcome:
        try:
            result = self._handler(part)
            forwards = [] if self._forward_to is None else self._forwards(part, result)
        except Exception as error:
            text = error_text(error, part)
            log.error("%s: %s\n%s", _described(part), text, "".join(traceback.format_tb(error.__traceback__)))
            return Outcome(part, error=text)
        return Outcome(part, forwards)

    def _forwards(self, part: list[Message], result: Any) -> list[dict[str, Any]]:
        """What to push onward: per message where the result can be told apart by message, else per part."""
        if len(part) > 1 and isinstance(result, list | tuple) and len(result) == len(part):
            pairs = zip(part, result, strict=True)
            forwards = [onward for message, one in pairs for onward in _onward([message], _listed(one))]
        else:
            forwards = _onward(part, _listed(result))
        inputs.batch(forwards)  # here, where what is wrong with it is the failure of this part alone
        return forwards

    def _settle(self, outcomes: Sequence[Outcome]) -> None:
        if not outcomes:
            return
        try:
            self._commit(outcomes)
        except LeaseLostError:
            if len(outcomes) == 1:
                self._lost(outcomes[0])
                return
            # Nothing was changed: so each for itself, and only those are lost whose lease is.
            for outcome in outcomes:
                self._settle([outcome])

    def _settle_last(self, outcomes: Sequence[Outcome]) -> None:
        """Settle while something worse is being raised, which must not get lost."""
        try:
            self._settle(outcomes)
        except QueenError as error:
            log.warning("Processed messages will be delivered again, settling them failed: %s", error)

    def _commit(self, outcomes: Sequence[Outcome]) -> None:
        completed = [message for one in outcomes if one.error is None for message in one.messages]
        failed: dict[str, list[Message]] = {}
        for outcome in outcomes:
            if outcome.error is not None:
                failed.setdefault(outcome.error, []).extend(outcome.messages)
        forwards = [onward for outcome in outcomes for onward in outcome.forwards]

        def settle_and_forward(tx: Transaction) -> int:
            tx.ack(completed)
            for error, messages in failed.items():
                tx.nack(messages, error=error)
            if self._forward_to is None or not forwards:
                return 0
            return sum(result.status == "queued" for result in tx.push(self._forward_to, forwards))

        if forwards or len(failed) > 1:
            self.tally.forwarded += self._hook.run_in_transaction(settle_and_forward)
        else:
            error, messages = next(iter(failed.items()), (None, []))
            self._hook.settle(completed=completed, failed=messages, error=error)
        self._count(outcomes)

    def _count(self, outcomes: Sequence[Outcome]) -> None:
        tally = self.tally
        for outcome in outcomes:
            if outcome.error is None:
                tally.completed += len(outcome.messages)
            else:
                tally.failed += len(outcome.messages)
                room = _LISTED_FAILURES - len(tally.failures)
                tally.failures += [_failure(one, outcome.error) for one in outcome.messages[: max(room, 0)]]
            self._let_go(outcome.messages)

    def _lost(self, outcome: Outcome) -> None:
        """A lease of these messages is gone. Those of other leases are given back: it was all or nothing."""
        self._let_go(outcome.messages)
        leases = _by_lease(outcome.messages)
        for messages in leases:
            released = self._release(messages) if len(leases) > 1 else 0
            self.tally.released += released
            self.tally.leases_lost += len(messages) - released
        log.warning("%s: the lease was lost, another consumer has them", _described(outcome.messages))

    def _let_go(self, messages: Sequence[Message]) -> None:
        for message in messages:
            self._held.pop((message.lease_id, message.seq), None)
        self._keeper.hold(self._held.values())


def error_text(error: BaseException, messages: Sequence[Message]) -> str:
    """An error's type and message, bounded; a payload that it quotes is left out."""
    text = str(error)
    for message in messages:
        with suppress(QueenError):
            for quoted in (message.payload_text, repr(message.payload), str(message.payload)):
                if len(quoted) > 3:
                    text = text.replace(quoted, "<payload>")
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= MAX_ERROR_LENGTH else f"{text[: MAX_ERROR_LENGTH - 1]}…"


def _onward(sources: Sequence[Message], items: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages for the next queue: traced, and placed, as their sources are, with ids that follow from them.

    The consumer group is part of the id: two groups that forward to one queue do so independently.
    """
    first = sources[0]
    ids = [message.id for message in sources]
    stem = (first.consumer_group or "", ids[0] if len(ids) == 1 else "+".join(ids))
    defaults = {
        name: getattr(first, name)
        for name in ("partition", "trace_id", "priority")
        if all(getattr(message, name) == getattr(first, name) for message in sources)
    }
    return [
        with_defaults(
            to_message(f"result {position}", item), transaction_id=derived_id((*stem, position)), **defaults
        )
        for position, item in enumerate(items)
    ]


def _listed(result: Any) -> list[Any]:
    """A callable's result as the messages to forward: none, one or several."""
    if result is None:
        return []
    return [item for item in result if item is not None] if isinstance(result, list | tuple) else [result]


def _by_lease(messages: Sequence[Message]) -> list[list[Message]]:
    leases: dict[str | None, list[Message]] = {}
    for message in messages:
        leases.setdefault(message.lease_id, []).append(message)
    return list(leases.values())


def _failure(message: Message, error: str) -> dict[str, Any]:
    return {
        "id": message.id,
        "transaction_id": message.transaction_id,
        "queue_name": message.queue_name,
        "partition": message.partition,
        "seq": message.seq,
        "attempt": message.attempt,
        "error": error,
    }


def _described(messages: Sequence[Message]) -> str:
    more = f" and {len(messages) - 1} more" if len(messages) > 1 else ""
    return f"{messages[0]!r}{more}"
