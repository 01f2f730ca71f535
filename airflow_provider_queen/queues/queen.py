"""``MessageQueueTrigger(scheme="queen", queue_name=…)``."""

from __future__ import annotations

from airflow.providers.common.messaging.providers.base_provider import BaseMessageQueueProvider
from airflow.triggers.base import BaseEventTrigger

from airflow_provider_queen.triggers.messages import QueenMessageTrigger


class QueenMessageQueueProvider(BaseMessageQueueProvider):
    """Makes the scheme ``queen`` of ``MessageQueueTrigger`` a :class:`.QueenMessageTrigger`.

    The trigger's parameters are those of :class:`.QueenMessageTrigger`. There is no URI form: the parameter
    ``queue`` of ``MessageQueueTrigger``, which would carry it, is deprecated.
    """

    scheme = "queen"

    def trigger_class(self) -> type[BaseEventTrigger]:
        return QueenMessageTrigger
