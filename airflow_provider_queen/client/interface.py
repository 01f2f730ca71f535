"""The methods of the contract, once for blocking and once for asyncio code.

Whoever can run an operation inherits them: a client, a transaction, the Airflow hook.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from airflow_provider_queen.client.operations import Operation, Operations
from airflow_provider_queen.client.results import (
    ConsumerGroupInfo,
    DeadLetter,
    Depth,
    Evicted,
    Lease,
    Message,
    PartitionStats,
    PushResult,
    QueueInfo,
    Requeued,
    Retained,
    SettleResult,
    StoredMessage,
)

T = TypeVar("T")


class QueueMethods(ABC):
    """The queue's methods, blocking."""

    @property
    @abstractmethod
    def _operations(self) -> Operations: ...

    @abstractmethod
    def _run(self, operation: Operation[T]) -> T: ...

    def configure_queue(self, queue_name: str, **options: Any) -> QueueInfo:
        """Create a queue, or change the named options of an existing one; the others stay.

        :param queue_name: 1 to 255 characters
        :param options: ``lease_time``, ``retry_limit`` and so on, as :class:`QueueInfo` names them
        """
        return self._run(self._operations.configure_queue(queue_name, options))

    def delete_queue(self, queue_name: str) -> bool:
        """Delete a queue with everything in it.

        :return: whether there was one
        """
        return self._run(self._operations.delete_queue(queue_name))

    def list_queues(self, namespace: str | None = None) -> list[QueueInfo]:
        """Every queue, or those of a namespace, with their options."""
        return self._run(self._operations.list_queues(namespace))

    def push(self, queue_name: str, messages: Iterable[Mapping[str, Any]]) -> list[PushResult]:
        """Store messages, all or none.

        :param queue_name: an existing queue
        :param messages: mappings with ``payload`` (anything that JSON can say) and, as wanted, ``partition``,
            ``transaction_id``, ``trace_id`` and ``priority``. The same transaction id is stored once in a
            partition; without one, each message is new
        :return: one result per message, in the same order
        """
        return self._run(self._operations.push(queue_name, messages))

    def pop(
        self,
        queue_name: str | None = None,
        *,
        partition: str | None = None,
        consumer_group: str | None = None,
        batch_size: int = 100,
        max_partitions: int = 1,
        lease_seconds: int | None = None,
        subscription_mode: str = "all",
        subscription_from: datetime | str | None = None,
        wait_seconds: float = 0,
        auto_ack: bool = False,
        namespace: str | None = None,
        task: str | None = None,
    ) -> list[Message]:
        """Take messages under a lease, oldest first.

        :param queue_name: the queue; or leave it out and name ``namespace``, ``task`` or both
        :param partition: only this one
        :param consumer_group: an independent reader; None is queue mode
        :param batch_size: how many messages at most
        :param max_partitions: from how many partitions at most
        :param lease_seconds: how long they are held; the queue's ``lease_time`` by default
        :param subscription_mode: where a new group begins: ``all``, ``new`` or ``timestamp``
        :param subscription_from: for ``timestamp``: a datetime with a zone
        :param wait_seconds: how long to wait for the first message; not inside a transaction
        :param auto_ack: acknowledge at once; the messages have no lease then
        :param namespace: pop from every queue of this namespace
        :param task: pop from every queue of this task
        """
        return self._run(
            self._operations.pop(
                queue_name,
                partition=partition,
                consumer_group=consumer_group,
                batch_size=batch_size,
                max_partitions=max_partitions,
                lease_seconds=lease_seconds,
                subscription_mode=subscription_mode,
                subscription_from=subscription_from,
                wait_seconds=wait_seconds,
                auto_ack=auto_ack,
                namespace=namespace,
                task=task,
            )
        )

    def ack(self, messages: Message | Iterable[Message]) -> SettleResult:
        """Settle messages as completed."""
        return self.settle(completed=messages)

    def nack(self, messages: Message | Iterable[Message], error: str | None = None) -> SettleResult:
        """Settle messages as failed: they come again after the queue's ``retry_delay``, or are dead letters.

        :param messages: messages as popped
        :param error: why, for the dead letter
        """
        return self.settle(failed=messages, error=error)

    def reject(self, messages: Message | Iterable[Message], error: str | None = None) -> SettleResult:
        """Settle messages as rejected: dead letters at once.

        :param messages: messages as popped
        :param error: why, for the dead letter
        """
        return self.settle(rejected=messages, error=error)

    def release(self, messages: Message | Iterable[Message]) -> SettleResult:
        """Give messages back as if they had not been popped."""
        return self.settle(released=messages)

    def settle(
        self,
        *,
        completed: Message | Iterable[Message] | None = None,
        failed: Message | Iterable[Message] | None = None,
        rejected: Message | Iterable[Message] | None = None,
        released: Message | Iterable[Message] | None = None,
        error: str | None = None,
    ) -> SettleResult:
        """Settle messages in any mix, all or none. What is not named stays leased.

        :param completed: done
        :param failed: to be delivered again, or dead-lettered when the retries are used up
        :param rejected: to the dead letters
        :param released: given back, no attempt counted
        :param error: why they failed or were rejected
        """
        return self._run(
            self._operations.settle(
                completed=completed, failed=failed, rejected=rejected, released=released, error=error
            )
        )

    def renew(self, messages: Message | Iterable[Message], seconds: int = 60) -> list[Lease]:
        """Extend the leases of messages, all or none.

        :param messages: messages as popped; one of a lease is enough
        :param seconds: from now
        """
        return self._run(self._operations.renew(messages, seconds))

    def depth(
        self,
        queue_name: str | None = None,
        consumer_group: str | None = None,
        *,
        namespace: str | None = None,
        task: str | None = None,
    ) -> Depth:
        """How much waits for a group in a queue, or in all queues of a namespace and task.

        :param queue_name: the queue
        :param consumer_group: the group; None is queue mode
        :param namespace: instead of a queue
        :param task: instead of a queue, or with a namespace
        """
        return self._run(self._operations.depth(queue_name, consumer_group, namespace, task))

    def stats(self, queue_name: str | None = None) -> list[PartitionStats]:
        """One row per queue, partition, priority and group: what a dashboard shows."""
        return self._run(self._operations.stats(queue_name))

    def seek(
        self,
        queue_name: str,
        consumer_group: str | None = None,
        to: str | datetime = "beginning",
        partition: str | None = None,
    ) -> int:
        """Move a group's cursor.

        :param queue_name: the queue
        :param consumer_group: the group; None is queue mode
        :param to: ``"beginning"``, ``"end"`` or a datetime with a zone
        :param partition: only this one
        :return: how many cursors were moved
        """
        return self._run(self._operations.seek(queue_name, consumer_group, to, partition))

    def list_consumer_groups(self, queue_name: str | None = None) -> list[ConsumerGroupInfo]:
        """The groups that read a queue, or any."""
        return self._run(self._operations.list_consumer_groups(queue_name))

    def delete_consumer_group(self, consumer_group: str | None, queue_name: str | None = None) -> int:
        """Forget a group, its subscription and its cursors, in one queue or everywhere.

        :return: how many cursors were deleted
        """
        return self._run(self._operations.delete_consumer_group(consumer_group, queue_name))

    def list_messages(
        self,
        queue_name: str,
        partition: str | None = None,
        after: StoredMessage | str | UUID | None = None,
        limit: int = 100,
    ) -> list[StoredMessage]:
        """A page of a queue's messages, newest first. Nothing is consumed.

        :param queue_name: the queue
        :param partition: only this one
        :param after: the last message of the page before, or its id
        :param limit: how many at most
        """
        return self._run(self._operations.list_messages(queue_name, partition, after, limit))

    def trace(self, trace_id: str | UUID) -> list[StoredMessage]:
        """Every message of a pipeline, over all queues, in the order of time."""
        return self._run(self._operations.trace(trace_id))

    def dead_letters(
        self,
        queue_name: str,
        *,
        consumer_group: str | None = None,
        partition: str | None = None,
        after: DeadLetter | int | None = None,
        limit: int = 100,
        include_requeued: bool = False,
    ) -> list[DeadLetter]:
        """A page of a queue's dead letters, newest first.

        :param queue_name: the queue
        :param consumer_group: only those of this group; None is any group
        :param partition: only those of this partition
        :param after: the last one of the page before, or its number
        :param limit: how many at most
        :param include_requeued: also those that were requeued
        """
        return self._run(
            self._operations.dead_letters(
                queue_name,
                consumer_group=consumer_group,
                partition=partition,
                after=after,
                limit=limit,
                include_requeued=include_requeued,
            )
        )

    def requeue_dead_letters(
        self,
        queue_name: str,
        ids: Iterable[DeadLetter | int] | None = None,
        *,
        consumer_group: str | None = None,
        limit: int = 1000,
    ) -> list[Requeued]:
        """Push dead letters again, each once however often this is called.

        :param queue_name: the queue
        :param ids: dead letters or their numbers; None is all of them
        :param consumer_group: only those of this group; None is any group
        :param limit: how many at most
        """
        return self._run(self._operations.requeue_dead_letters(queue_name, ids, consumer_group, limit))

    def purge_dead_letters(
        self,
        queue_name: str,
        ids: Iterable[DeadLetter | int] | None = None,
        *,
        consumer_group: str | None = None,
        older_than_seconds: int | None = None,
    ) -> int:
        """Delete dead letters.

        :param queue_name: the queue
        :param ids: dead letters or their numbers; None is all of them
        :param consumer_group: only those of this group; None is any group
        :param older_than_seconds: only those that failed so long ago
        :return: how many were deleted
        """
        return self._run(
            self._operations.purge_dead_letters(queue_name, ids, consumer_group, older_than_seconds)
        )

    def reclaim(self, queue_name: str | None = None, limit: int = 1000) -> int:
        """End leases that have expired. Pop does so too; this is for figures that should not wait for one."""
        return self._run(self._operations.reclaim(queue_name, limit))

    def evict(self, queue_name: str | None = None, limit: int = 10_000) -> list[Evicted]:
        """Dead-letter messages that waited longer than their queue's ``max_wait_time_seconds``."""
        return self._run(self._operations.evict(queue_name, limit))

    def retain(self, queue_name: str | None = None, limit: int = 10_000) -> list[Retained]:
        """Delete messages as the queues' retention options allow."""
        return self._run(self._operations.retain(queue_name, limit))


class AsyncQueueMethods(ABC):
    """The same for asyncio. :class:`QueueMethods` says what each one does."""

    @property
    @abstractmethod
    def _operations(self) -> Operations: ...

    @abstractmethod
    async def _run(self, operation: Operation[T]) -> T: ...

    async def configure_queue(self, queue_name: str, **options: Any) -> QueueInfo:
        return await self._run(self._operations.configure_queue(queue_name, options))

    async def delete_queue(self, queue_name: str) -> bool:
        return await self._run(self._operations.delete_queue(queue_name))

    async def list_queues(self, namespace: str | None = None) -> list[QueueInfo]:
        return await self._run(self._operations.list_queues(namespace))

    async def push(self, queue_name: str, messages: Iterable[Mapping[str, Any]]) -> list[PushResult]:
        return await self._run(self._operations.push(queue_name, messages))

    async def pop(
        self,
        queue_name: str | None = None,
        *,
        partition: str | None = None,
        consumer_group: str | None = None,
        batch_size: int = 100,
        max_partitions: int = 1,
        lease_seconds: int | None = None,
        subscription_mode: str = "all",
        subscription_from: datetime | str | None = None,
        wait_seconds: float = 0,
        auto_ack: bool = False,
        namespace: str | None = None,
        task: str | None = None,
    ) -> list[Message]:
        return await self._run(
            self._operations.pop(
                queue_name,
                partition=partition,
                consumer_group=consumer_group,
                batch_size=batch_size,
                max_partitions=max_partitions,
                lease_seconds=lease_seconds,
                subscription_mode=subscription_mode,
                subscription_from=subscription_from,
                wait_seconds=wait_seconds,
                auto_ack=auto_ack,
                namespace=namespace,
                task=task,
            )
        )

    async def ack(self, messages: Message | Iterable[Message]) -> SettleResult:
        return await self.settle(completed=messages)

    async def nack(self, messages: Message | Iterable[Message], error: str | None = None) -> SettleResult:
        return await self.settle(failed=messages, error=error)

    async def reject(self, messages: Message | Iterable[Message], error: str | None = None) -> SettleResult:
        return await self.settle(rejected=messages, error=error)

    async def release(self, messages: Message | Iterable[Message]) -> SettleResult:
        return await self.settle(released=messages)

    async def settle(
        self,
        *,
        completed: Message | Iterable[Message] | None = None,
        failed: Message | Iterable[Message] | None = None,
        rejected: Message | Iterable[Message] | None = None,
        released: Message | Iterable[Message] | None = None,
        error: str | None = None,
    ) -> SettleResult:
        return await self._run(
            self._operations.settle(
                completed=completed, failed=failed, rejected=rejected, released=released, error=error
            )
        )

    async def renew(self, messages: Message | Iterable[Message], seconds: int = 60) -> list[Lease]:
        return await self._run(self._operations.renew(messages, seconds))

    async def depth(
        self,
        queue_name: str | None = None,
        consumer_group: str | None = None,
        *,
        namespace: str | None = None,
        task: str | None = None,
    ) -> Depth:
        return await self._run(self._operations.depth(queue_name, consumer_group, namespace, task))

    async def stats(self, queue_name: str | None = None) -> list[PartitionStats]:
        return await self._run(self._operations.stats(queue_name))

    async def seek(
        self,
        queue_name: str,
        consumer_group: str | None = None,
        to: str | datetime = "beginning",
        partition: str | None = None,
    ) -> int:
        return await self._run(self._operations.seek(queue_name, consumer_group, to, partition))

    async def list_consumer_groups(self, queue_name: str | None = None) -> list[ConsumerGroupInfo]:
        return await self._run(self._operations.list_consumer_groups(queue_name))

    async def delete_consumer_group(self, consumer_group: str | None, queue_name: str | None = None) -> int:
        return await self._run(self._operations.delete_consumer_group(consumer_group, queue_name))

    async def list_messages(
        self,
        queue_name: str,
        partition: str | None = None,
        after: StoredMessage | str | UUID | None = None,
        limit: int = 100,
    ) -> list[StoredMessage]:
        return await self._run(self._operations.list_messages(queue_name, partition, after, limit))

    async def trace(self, trace_id: str | UUID) -> list[StoredMessage]:
        return await self._run(self._operations.trace(trace_id))

    async def dead_letters(
        self,
        queue_name: str,
        *,
        consumer_group: str | None = None,
        partition: str | None = None,
        after: DeadLetter | int | None = None,
        limit: int = 100,
        include_requeued: bool = False,
    ) -> list[DeadLetter]:
        return await self._run(
            self._operations.dead_letters(
                queue_name,
                consumer_group=consumer_group,
                partition=partition,
                after=after,
                limit=limit,
                include_requeued=include_requeued,
            )
        )

    async def requeue_dead_letters(
        self,
        queue_name: str,
        ids: Iterable[DeadLetter | int] | None = None,
        *,
        consumer_group: str | None = None,
        limit: int = 1000,
    ) -> list[Requeued]:
        return await self._run(self._operations.requeue_dead_letters(queue_name, ids, consumer_group, limit))

    async def purge_dead_letters(
        self,
        queue_name: str,
        ids: Iterable[DeadLetter | int] | None = None,
        *,
        consumer_group: str | None = None,
        older_than_seconds: int | None = None,
    ) -> int:
        return await self._run(
            self._operations.purge_dead_letters(queue_name, ids, consumer_group, older_than_seconds)
        )

    async def reclaim(self, queue_name: str | None = None, limit: int = 1000) -> int:
        return await self._run(self._operations.reclaim(queue_name, limit))

    async def evict(self, queue_name: str | None = None, limit: int = 10_000) -> list[Evicted]:
        return await self._run(self._operations.evict(queue_name, limit))

    async def retain(self, queue_name: str | None = None, limit: int = 10_000) -> list[Retained]:
        return await self._run(self._operations.retain(queue_name, limit))
