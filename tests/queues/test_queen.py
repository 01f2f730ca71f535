"""The scheme ``queen`` of Airflow's common messaging."""

from __future__ import annotations

import pytest
from airflow.providers.common.messaging.triggers.msg_queue import MESSAGE_QUEUE_PROVIDERS, MessageQueueTrigger
from airflow.sdk import Asset, AssetWatcher

from airflow_provider_queen.exceptions import InvalidOptionError
from airflow_provider_queen.queues.queen import QueenMessageQueueProvider
from airflow_provider_queen.triggers.messages import QueenMessageTrigger


def test_airflow_finds_the_provider() -> None:
    assert sum(isinstance(each, QueenMessageQueueProvider) for each in MESSAGE_QUEUE_PROVIDERS) == 1


def test_only_our_scheme_and_no_uri() -> None:
    provider = QueenMessageQueueProvider()
    assert provider.scheme_matches("queen")
    assert not provider.scheme_matches("kafka")
    assert not provider.queue_matches("queen://orders")
    assert provider.trigger_class() is QueenMessageTrigger


def test_the_unified_trigger_becomes_ours() -> None:
    unified = MessageQueueTrigger(
        scheme="queen", queue_name="orders", consumer_group="billing", ring_interval=5
    )
    ours = QueenMessageTrigger(queue_name="orders", consumer_group="billing", ring_interval=5.0)
    assert unified.serialize() == ours.serialize()
    asset = Asset("orders", watchers=[AssetWatcher(name="doorbell", trigger=unified)])
    assert asset.watchers[0].trigger.serialize() == ours.serialize()


def test_a_parameter_that_it_does_not_have() -> None:
    with pytest.raises(TypeError, match="topic"):
        MessageQueueTrigger(scheme="queen", topic="orders").serialize()
    with pytest.raises(InvalidOptionError):
        MessageQueueTrigger(scheme="queen").serialize()
