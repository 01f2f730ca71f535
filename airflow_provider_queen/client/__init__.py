"""The queue from Python. Imports no Airflow and no Spark."""

from __future__ import annotations

from airflow_provider_queen.client.asynchronous import AsyncQueenClient, AsyncTransaction
from airflow_provider_queen.client.blocking import QueenClient, Transaction
from airflow_provider_queen.client.encryption import Keyring
from airflow_provider_queen.client.options import ClientOptions, RetryPolicy
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

__all__ = [
    "AsyncQueenClient",
    "AsyncTransaction",
    "ClientOptions",
    "ConsumerGroupInfo",
    "DeadLetter",
    "Depth",
    "Evicted",
    "Keyring",
    "Lease",
    "Message",
    "PartitionStats",
    "PushResult",
    "QueenClient",
    "QueueInfo",
    "Requeued",
    "Retained",
    "RetryPolicy",
    "SettleResult",
    "StoredMessage",
    "Transaction",
]
