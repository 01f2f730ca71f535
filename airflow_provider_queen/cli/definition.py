"""The commands of ``airflow queen``. Each ``airflow`` command loads this, so the work is imported later."""

from __future__ import annotations

from airflow.cli.cli_config import (
    ActionCommand,
    Arg,
    CLICommand,
    GroupCommand,
    lazy_load_command,
    positive_int,
)

_COMMANDS = "airflow_provider_queen.cli.commands"

_QUEUE = Arg(("queue_name",), help="the queue")
_CONNECTION = Arg(
    ("--conn-id",),
    help="Airflow connection of type queen or postgres (default: queen_default)",
    default="queen_default",
    metavar="CONN_ID",
)
_OUTPUT = Arg(
    ("-o", "--output"),
    help="table for people (default), json for programs",
    choices=("table", "json"),
    default="table",
)
_VERBOSE = Arg(("-v", "--verbose"), help="show log messages too", action="store_true")
_NAMESPACE = Arg(("--namespace",), help="every queue of this namespace")
_TASK = Arg(("--task",), help="every queue of this task")
_GROUP = Arg(("-g", "--consumer-group"), help="the group (default: queue mode)", metavar="GROUP")
_ANY_GROUP = Arg(("-g", "--consumer-group"), help="only those of this group", metavar="GROUP")
_PARTITION = Arg(("-p", "--partition"), help="only this partition")
_IDS = Arg(
    ("--ids",),
    help="numbers of dead letters, as list shows them",
    type=positive_int(allow_zero=False),
    nargs="+",
    metavar="ID",
)
_ALL = Arg(("--all",), help="every dead letter of the queue, instead of --ids", action="store_true")


def _limit(default: int, help: str) -> Arg:
    return Arg(
        ("-n", "--limit"),
        help=f"{help} (default: {default})",
        type=positive_int(allow_zero=False),
        default=default,
    )


def _action(name: str, help: str, *args: Arg, function: str | None = None) -> ActionCommand:
    return ActionCommand(
        name=name,
        help=help,
        func=lazy_load_command(f"{_COMMANDS}.{function or name}"),
        args=(*args, _CONNECTION, _OUTPUT, _VERBOSE),
    )


def get_queen_commands() -> list[CLICommand]:
    """For the key ``cli`` of the provider's information."""
    dead_letters = GroupCommand(
        name="dead-letters",
        help="Messages that a consumer group gave up",
        subcommands=(
            _action(
                "list",
                "List them, newest first, without their payloads",
                *(_QUEUE, _ANY_GROUP, _PARTITION, _limit(100, "how many at most")),
                Arg(("--include-requeued",), help="also those that were requeued", action="store_true"),
                function="list_dead_letters",
            ),
            _action(
                "requeue",
                "Push them again, oldest first",
                *(_QUEUE, _IDS, _ALL, _ANY_GROUP, _limit(1000, "with --all: how many at most")),
                function="requeue_dead_letters",
            ),
            _action(
                "purge",
                "Delete them",
                *(_QUEUE, _IDS, _ALL, _ANY_GROUP),
                Arg(
                    ("--older-than-seconds",),
                    help="only those that failed so long ago",
                    type=positive_int(allow_zero=True),
                    metavar="SECONDS",
                ),
                function="purge_dead_letters",
            ),
        ),
    )
    return [
        GroupCommand(
            name="queen",
            help="Queues inside PostgreSQL",
            description="Exit code 0: done; 1: failed, standard error says why; 2: wrong arguments.",
            subcommands=(
                _action("queues", "List queues and their options", _NAMESPACE),
                _action(
                    "depth",
                    "How much waits for a consumer group",
                    Arg(("queue_name",), help="the queue; or --namespace, --task", nargs="?"),
                    *(_GROUP, _NAMESPACE, _TASK),
                ),
                _action(
                    "push",
                    "Push messages, all or none, and show their ids",
                    _QUEUE,
                    Arg(
                        ("payloads",),
                        help="each one a JSON text; without any, JSON lines on standard input",
                        nargs="*",
                        metavar="PAYLOAD",
                    ),
                    Arg(("-p", "--partition"), help="the partition (default: Default)"),
                    Arg(("--transaction-id",), help="of a single message: stored once", metavar="ID"),
                    Arg(("--trace-id",), help="the pipeline that they belong to", metavar="UUID"),
                    Arg(("--priority",), help="0 to 9, higher first", type=positive_int(allow_zero=True)),
                ),
                _action(
                    "pop",
                    "Consume messages and show them: each is acknowledged when it was printed",
                    *(_QUEUE, _GROUP, _PARTITION, _limit(1, "how many at most")),
                    Arg(
                        ("--wait-seconds",),
                        help="how long to wait for the first one (default: 0)",
                        type=float,
                        default=0.0,
                        metavar="SECONDS",
                    ),
                    Arg(("--release",), help="give them back instead of acknowledging", action="store_true"),
                ),
                _action(
                    "tail",
                    "Show the newest messages, with their payloads; nothing is consumed",
                    *(_QUEUE, _PARTITION, _limit(10, "how many at first")),
                    Arg(
                        ("-f", "--follow"),
                        help="go on with those that come, until Ctrl-C",
                        action="store_true",
                    ),
                    Arg(
                        ("--interval",),
                        help="with --follow: seconds between two looks (default: 1)",
                        type=float,
                        default=1.0,
                        metavar="SECONDS",
                    ),
                ),
                dead_letters,
                _action(
                    "seek",
                    "Move a group's cursor",
                    *(_QUEUE, _GROUP, _PARTITION),
                    Arg(
                        ("--to",),
                        help="beginning, end, or a time such as 2026-01-31T12:00+00:00",
                        required=True,
                        metavar="POSITION",
                    ),
                ),
                _action(
                    "migrate",
                    "Bring the schema queen to a version",
                    Arg(
                        ("--target",),
                        help="head (default), base (deletes every queue), a revision, or a step such as -1",
                        default="head",
                    ),
                    Arg(("--dry-run",), help="print the SQL and change nothing", action="store_true"),
                ),
            ),
        )
    ]
