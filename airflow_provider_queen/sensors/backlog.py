"""Gates on how much waits in a queue."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseSensorOperator, PokeReturnValue, conf
from airflow.sdk.exceptions import AirflowSkipException

from airflow_provider_queen.client.listening import Backlog, wait_for_depth
from airflow_provider_queen.exceptions import InvalidOptionError, QueenError
from airflow_provider_queen.hooks.queen import QueenHook
from airflow_provider_queen.triggers.backlog import BacklogCondition, QueenBacklogTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

_LIMITS = tuple(limit.name for limit in fields(BacklogCondition))


class QueenBacklogSensor(BaseSensorOperator):
    """Waits until the backlog of a group is as wanted, and returns it.

    Of several conditions each must hold; at least one is needed. The result has ``pending``, ``in_flight``,
    ``dead_letters`` and ``oldest_age_seconds``.

    In mode ``poke`` a notification of the database ends the sleep between two pokes. With ``deferrable`` the
    sensor pokes once and then waits in the triggerer, where all sensors of a connection share one database
    connection; a database that is away for a while is waited for there.

    :param queue_name: the queue (templated); or leave it out and name ``namespace``, ``task`` or both
    :param namespace: every queue of this namespace (templated)
    :param task: every queue of this task (templated)
    :param consumer_group: whose backlog (templated); None is queue mode
    :param min_pending: at least so many messages are not settled, in flight included (templated)
    :param max_pending: at most so many are not settled (templated); 0 is drained
    :param min_oldest_age_seconds: the oldest of them has waited that long (templated)
    :param min_dead_letters: the group has at least so many dead letters (templated)
    :param queen_conn_id: the connection (templated)
    :param deferrable: wait in the triggerer, without a worker slot
    """

    template_fields: Sequence[str] = (
        "queue_name",
        "namespace",
        "task",
        "consumer_group",
        *_LIMITS,
        "queen_conn_id",
    )

    def __init__(
        self,
        *,
        queue_name: str | None = None,
        namespace: str | None = None,
        task: str | None = None,
        consumer_group: str | None = None,
        min_pending: int | str | None = None,
        max_pending: int | str | None = None,
        min_oldest_age_seconds: float | str | None = None,
        min_dead_letters: int | str | None = None,
        queen_conn_id: str = QueenHook.default_conn_name,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.queue_name = queue_name
        self.namespace = namespace
        self.task = task
        self.consumer_group = consumer_group
        self.min_pending = min_pending
        self.max_pending = max_pending
        self.min_oldest_age_seconds = min_oldest_age_seconds
        self.min_dead_letters = min_dead_letters
        self.queen_conn_id = queen_conn_id
        self.deferrable = deferrable
        self._check_what_is_known()

    @cached_property
    def hook(self) -> QueenHook:
        return QueenHook(queen_conn_id=self.queen_conn_id)

    def poke(self, context: Context) -> PokeReturnValue:
        backlog, condition = self._backlog(), self._condition()
        depth = self.hook.depth(
            backlog.queue_name,
            consumer_group=backlog.consumer_group,
            namespace=backlog.namespace,
            task=backlog.task,
        )
        self.log.info("%s: %s", backlog, depth)
        return PokeReturnValue(condition.is_met(depth), asdict(depth))

    def execute(self, context: Context) -> Any:
        if self.deferrable:
            found = self._poke_before_deferring(context)
            return found.xcom_value if found.is_done else self._defer()
        try:
            return super().execute(context)
        finally:
            self.hook.close()

    def execute_complete(self, context: Context, event: dict[str, Any]) -> dict[str, Any]:
        """Return the depth that the trigger saw."""
        if event["status"] != "success":
            if self.never_fail:
                raise AirflowSkipException(f"never_fail is set: {event['message']}")
            raise QueenError(event["message"])
        self.log.info("The backlog is as wanted: %s", event)
        return {name: value for name, value in event.items() if name != "status"}

    def _poke_before_deferring(self, context: Context) -> PokeReturnValue:
        try:
            return self.poke(context)
        except QueenError as error:
            # As in the other modes, where the base class does it.
            if self.silent_fail:
                self.log.error("Sensor poke failed: %s", error)
                return PokeReturnValue(is_done=False)
            if self.never_fail:
                raise AirflowSkipException("Skipping due to never_fail is set to True.") from error
            raise
        finally:
            self.hook.close()

    def _defer(self) -> NoReturn:
        self.defer(
            trigger=QueenBacklogTrigger(
                queen_conn_id=self.queen_conn_id,
                **asdict(self._backlog()),
                **asdict(self._condition()),
                poll_interval=max(self.poke_interval, 1.0),
            ),
            method_name="execute_complete",
            timeout=timedelta(seconds=self.timeout),
        )

    def _get_next_poke_interval(
        self, started_at: datetime | float, run_duration: Callable[[], float], poke_count: int
    ) -> float:
        """What is left to sleep: in mode ``poke`` nothing, the sensor has listened all the while."""
        interval = super()._get_next_poke_interval(started_at, run_duration, poke_count)
        return interval if self.reschedule else self._listen(interval)

    def _listen(self, seconds: float) -> float:
        begun = time.monotonic()
        condition = self._condition()
        with suppress(QueenError):  # the next poke meets it again, and has its say
            wait_for_depth(self.hook, self._backlog(), condition.is_met, seconds)
            return 0
        return max(begun + seconds - time.monotonic(), 0)

    def _backlog(self) -> Backlog:
        return Backlog(self.queue_name, self.namespace, self.task, self.consumer_group)

    def _condition(self) -> BacklogCondition:
        return BacklogCondition(**{name: _number(name, getattr(self, name)) for name in _LIMITS})

    def _check_what_is_known(self) -> None:
        """Refuse at parse time what no template or XCom can mend later."""
        if all(_is_name(name) for name in (self.queue_name, self.namespace, self.task, self.consumer_group)):
            self._backlog()
        if all(limit is None or isinstance(limit, int | float) for limit in map(self.__dict__.get, _LIMITS)):
            self._condition()


def _is_name(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _number(name: str, value: Any) -> Any:
    """A limit as a number; a rendered template is text."""
    if not isinstance(value, str):
        return value
    try:
        return float(value) if name == "min_oldest_age_seconds" else int(value)
    except ValueError:
        raise InvalidOptionError(f"{name} is {value!r}, allowed are numbers from 0") from None
