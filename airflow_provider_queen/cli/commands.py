"""What the commands of ``airflow queen`` do. Payloads are shown by ``pop`` and ``tail``, nowhere else."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow.exceptions import AirflowException
from airflow.models import Connection
from airflow.utils.cli import suppress_logs_and_warning
from airflow.utils.providers_configuration_loader import providers_configuration_loaded
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from airflow_provider_queen.client import Message, PartitionStats, StoredMessage, schema
from airflow_provider_queen.exceptions import InvalidOptionError, QueenError
from airflow_provider_queen.hooks.queen import QueenHook

if TYPE_CHECKING:
    from airflow.sdk import Connection as SdkConnection

_PAGE = 100
_PIECE = 1024  # characters: at most 4096 bytes, which POSIX keeps together


class CommandHook(QueenHook):
    """Finds connections as a command does: in Airflow's database too, which a task has no access to."""

    @classmethod
    def get_connection(cls, conn_id: str) -> SdkConnection:
        connection: Any = Connection.get_connection_from_secrets(conn_id)
        return connection


Command = Callable[[Namespace, CommandHook], None]


def _command(function: Command) -> Callable[[Namespace], None]:
    """A command with its connection, and with exit codes instead of tracebacks."""

    @functools.wraps(function)
    @suppress_logs_and_warning
    @providers_configuration_loaded
    def command(args: Namespace) -> None:
        try:
            with closing(CommandHook(queen_conn_id=args.conn_id)) as hook:
                function(args, hook)
            sys.stdout.flush()
        except InvalidOptionError as error:
            _fail(error, 2)
        except (QueenError, AirflowException) as error:
            _fail(error, 1)
        except BrokenPipeError:
            # Whoever read our output has seen enough. Python must not flush into the pipe at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)

    return command


def _fail(error: Exception, code: int) -> None:
    sys.stderr.write(f"airflow queen: {' '.join(str(error).split())}\n")
    sys.exit(code)


@_command
def queues(args: Namespace, hook: CommandHook) -> None:
    listed = [asdict(queue) for queue in hook.list_queues(args.namespace)]
    if args.output == "json":
        _print_json(listed)
        return
    shown = ("name", "namespace", "task", "priority", "lease_time", "retry_limit", "max_queue_size")
    rows = [{**{name: queue[name] for name in shown}, "options": _other_options(queue)} for queue in listed]
    _print_table(rows, "There is no queue")


@_command
def depth(args: Namespace, hook: CommandHook) -> None:
    found = hook.depth(args.queue_name, args.consumer_group, namespace=args.namespace, task=args.task)
    _print_one(asdict(found), args)


@_command
def push(args: Namespace, hook: CommandHook) -> None:
    payloads = args.payloads or [line for line in sys.stdin if line.strip()]
    if args.transaction_id is not None and len(payloads) != 1:
        raise InvalidOptionError(f"--transaction-id is for a single message, there are {len(payloads)}")
    messages = [
        {
            "payload": _parse(position, text),
            "partition": args.partition,
            "transaction_id": args.transaction_id,
            "trace_id": args.trace_id,
            "priority": args.priority,
        }
        for position, text in enumerate(payloads)
    ]
    _print_rows(
        [result._asdict() for result in hook.push(args.queue_name, messages)], args, "Nothing was pushed"
    )


@_command
def pop(args: Namespace, hook: CommandHook) -> None:
    messages = hook.pop(
        args.queue_name,
        partition=args.partition,
        consumer_group=args.consumer_group,
        batch_size=args.limit,
        max_partitions=args.limit,
        wait_seconds=args.wait_seconds,
    )
    # Printed first: what nobody saw must not be acknowledged.
    printed = False
    try:
        _print_rows([_shown(message) for message in messages], args, "No message is ready")
        sys.stdout.flush()
        printed = True
    finally:
        if messages:
            (hook.release if args.release or not printed else hook.ack)(messages)


@_command
def tail(args: Namespace, hook: CommandHook) -> None:
    seen = _Seen()
    if args.follow:
        seen.add(hook.stats(args.queue_name))
    newest = hook.list_messages(args.queue_name, args.partition, limit=args.limit)
    seen.show(newest)
    # With --follow each message is a line of its own: nobody knows when an array would end.
    lines = args.follow
    show: Callable[[Sequence[StoredMessage]], None] = functools.partial(
        _print_messages, args=args, lines=lines
    )
    if newest or not lines:
        show(newest[::-1])
    with suppress(KeyboardInterrupt):
        while args.follow:
            time.sleep(max(args.interval, 0.05))
            if fresh := _fresh(hook, args, seen):
                show(fresh[::-1])


@_command
def list_dead_letters(args: Namespace, hook: CommandHook) -> None:
    found = hook.dead_letters(
        args.queue_name,
        consumer_group=args.consumer_group,
        partition=args.partition,
        limit=args.limit,
        include_requeued=args.include_requeued,
    )
    shown = (
        *("id", "message_id", "consumer_group", "partition", "priority", "seq", "transaction_id", "trace_id"),
        *("reason", "error_message", "retry_count", "failed_at", "requeued_at"),
    )
    rows = [{name: getattr(letter, name) for name in shown} for letter in found]
    if args.output == "table":
        left_out = {"message_id", "trace_id", "priority", *([] if args.include_requeued else ["requeued_at"])}
        rows = [{name: value for name, value in row.items() if name not in left_out} for row in rows]
    _print_rows(rows, args, "There are no dead letters")


@_command
def requeue_dead_letters(args: Namespace, hook: CommandHook) -> None:
    requeued = hook.requeue_dead_letters(
        args.queue_name, _chosen(args), consumer_group=args.consumer_group, limit=args.limit
    )
    _print_rows([one._asdict() for one in requeued], args, "There are no dead letters to requeue")


@_command
def purge_dead_letters(args: Namespace, hook: CommandHook) -> None:
    purged = hook.purge_dead_letters(
        args.queue_name,
        _chosen(args),
        consumer_group=args.consumer_group,
        older_than_seconds=args.older_than_seconds,
    )
    _print_one({"purged": purged}, args)


@_command
def seek(args: Namespace, hook: CommandHook) -> None:
    _print_one({"moved": hook.seek(args.queue_name, args.consumer_group, args.to, args.partition)}, args)


@_command
def migrate(args: Namespace, hook: CommandHook) -> None:
    if args.dry_run:
        sql = schema.dry_run(hook.dsn, args.target)
        if args.output == "json":
            _print_json({"sql": sql})
        else:
            _write(sql)
        return
    report = asdict(hook.migrate(args.target))
    if args.output == "table":
        report["reapplied"] = f"{len(report['reapplied'])} files"
        report["applied"] = ", ".join(report["applied"])
    _print_one(report, args)


class _Seen:
    """How far each lane was shown. Seqs are dense and commit in order, so this is all there is to know."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], int] = {}

    def add(self, lanes: Iterable[PartitionStats]) -> None:
        """All that is there now."""
        self._last |= {(lane.partition, lane.priority): lane.last_seq for lane in lanes}

    def show(self, messages: Iterable[StoredMessage]) -> None:
        for message in messages:
            lane = (message.partition, message.priority)
            self._last[lane] = max(self._last.get(lane, 0), message.seq)

    def has(self, message: StoredMessage) -> bool:
        return message.seq <= self._last.get((message.partition, message.priority), 0)


def _fresh(hook: CommandHook, args: Namespace, seen: _Seen) -> list[StoredMessage]:
    """Messages that came since, newest first."""
    fresh: list[StoredMessage] = []
    for page in _pages(hook, args):
        new = [message for message in page if not seen.has(message)]
        fresh += new
        # Lanes commit each in its own time: a page without anything new is the sign that all is known.
        if not new:
            break
    seen.show(fresh)
    return fresh


def _pages(hook: CommandHook, args: Namespace) -> Iterator[list[StoredMessage]]:
    page = hook.list_messages(args.queue_name, args.partition, limit=_PAGE)
    while page:
        yield page
        page = hook.list_messages(args.queue_name, args.partition, after=page[-1], limit=_PAGE)


def _chosen(args: Namespace) -> list[int] | None:
    if bool(args.ids) == bool(args.all):
        raise InvalidOptionError("name dead letters with --ids, or all of them with --all")
    chosen: list[int] | None = args.ids or None
    return chosen


def _parse(position: int, text: str) -> Any:
    with suppress(ValueError):
        return json.loads(text)
    # Raised out here: the parser's error has the text in it.
    raise InvalidOptionError(f"payload {position} is no JSON; a text needs its quotes: '\"text\"'")


def _other_options(queue: Mapping[str, Any]) -> str:
    names = (
        *("delayed_processing", "window_buffer", "max_wait_time_seconds", "retention_seconds"),
        *("completed_retention_seconds", "retention_enabled", "encryption_enabled"),
    )
    return " ".join(f"{name}={queue[name]}" for name in names if queue[name])


def _shown(message: Message | StoredMessage) -> dict[str, Any]:
    names = ("id", "partition", "priority", "seq", "transaction_id", "trace_id", "created_at")
    shown = {name: getattr(message, name) for name in names}
    if isinstance(message, Message):
        shown["attempt"] = message.attempt
    return {**shown, "payload": message.payload}


def _print_messages(messages: Sequence[StoredMessage], args: Namespace, lines: bool) -> None:
    rows = [_shown(message) for message in messages]
    if lines and args.output == "json":
        for row in rows:
            _write(f"{_json(row)}\n")
    else:
        _print_rows(rows, args, "There is no message")
    sys.stdout.flush()


def _print_rows(rows: Sequence[Mapping[str, Any]], args: Namespace, if_none: str) -> None:
    if args.output == "json":
        _print_json(rows)
    else:
        _print_table(rows, if_none)


def _print_one(row: Mapping[str, Any], args: Namespace) -> None:
    if args.output == "json":
        _print_json(row)
    else:
        _print_table([row], "")


def _print_table(rows: Sequence[Mapping[str, Any]], if_none: str) -> None:
    if not rows:
        _write(f"{if_none}\n")
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else 240, markup=False, highlight=False)
    with console.capture() as printed:
        console.print(table)
    _write(printed.get())


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="seconds")
    if isinstance(value, float):
        return f"{value:.1f}"
    return _json(value) if isinstance(value, dict | list) else str(value)


def _write(text: str) -> None:
    """To standard output, in pieces that a pipe takes whole or refuses.

    Of a long text Python may drop the rest without an error when it runs unbuffered and the reader goes away;
    and pop acknowledges what it has printed.
    """
    for begin in range(0, len(text), _PIECE):
        sys.stdout.write(text[begin : begin + _PIECE])


def _print_json(value: Any) -> None:
    _write(f"{_json(value)}\n")


def _json(value: Any) -> str:
    return json.dumps(value, default=_json_value, ensure_ascii=False)


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no JSON")
