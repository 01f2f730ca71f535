"""What Airflow is told about this package, by the entry point ``apache_airflow_provider``.

Every Airflow process loads it at its start, so it imports nothing. Airflow ignores a key that it does not
know: a test holds each one against Airflow's own schema, and imports each class that is named.
"""

from __future__ import annotations

from typing import Any

_PACKAGE = "airflow_provider_queen"
_INTEGRATION = "Queen"


def get_provider_info() -> dict[str, Any]:
    return {
        "package-name": "airflow-provider-queen",
        "name": "Queen",
        "description": "Partitioned FIFO queues with consumer groups inside your own PostgreSQL.",
        "integrations": [{"integration-name": _INTEGRATION, "tags": ["software"]}],
        "connection-types": [_connection_type()],
        # One line each; a module or class comes in here with the commit that brings it.
        "cli": [f"{_PACKAGE}.cli.definition.get_queen_commands"],
        "extra-links": [f"{_PACKAGE}.links.queen.QueenLink"],
        "hooks": _modules("hooks.queen"),
        "notifications": [f"{_PACKAGE}.notifications.queen.QueenNotifier"],
        "operators": _modules(
            *("operators.admin", "operators.migrate", "operators.pop", "operators.push", "operators.spark")
        ),
        "queues": [f"{_PACKAGE}.queues.queen.QueenMessageQueueProvider"],
        "sensors": _modules("sensors.backlog"),
        "task-decorators": [
            {"name": "queen", "class-name": f"{_PACKAGE}.decorators.queen.queen_task"},
        ],
        "triggers": _modules("triggers.backlog", "triggers.messages"),
    }


def _modules(*names: str) -> list[dict[str, Any]]:
    return [
        {"integration-name": _INTEGRATION, "python-modules": [f"{_PACKAGE}.{name}" for name in names]},
    ]


def _connection_type() -> dict[str, Any]:
    return {
        "connection-type": "queen",
        "hook-class-name": f"{_PACKAGE}.hooks.queen.QueenHook",
        "hook-name": "Queen",
        "ui-field-behaviour": {
            "relabeling": {"schema": "Database"},
            "placeholders": {"host": "localhost", "port": "5432", "schema": "postgres"},
        },
        # Stored in the connection's extra, of which the hook takes these names and no others.
        "conn-fields": {
            "encryption_keys": _field(
                "Encryption keys",
                "For queues with encryption_enabled, separated by commas, newest first: the first one"
                " encrypts, all of them decrypt.",
                format="password",
            ),
            "sslmode": _choice(
                "SSL mode",
                "verify-full checks the server's certificate and its name.",
                *("disable", "allow", "prefer", "require", "verify-ca", "verify-full"),
            ),
            "sslrootcert": _field("SSL root certificates", "File with the authorities to trust, or system."),
            "sslcrl": _field("SSL revocation list", "File with certificates that are no longer trusted."),
            "sslcert": _field("SSL client certificate", "File with the certificate to show to the server."),
            "sslkey": _field("SSL client key", "File with the key of the client certificate."),
            "sslpassword": _field("SSL key password", "Opens the client key.", format="password"),
            "sslnegotiation": _choice(
                "SSL negotiation", "direct saves a round trip, from PostgreSQL 17 on.", "postgres", "direct"
            ),
            "ssl_min_protocol_version": _choice("Oldest TLS version", None, "TLSv1.2", "TLSv1.3"),
            "channel_binding": _choice(
                "Channel binding", "require: no man in the middle.", "disable", "prefer", "require"
            ),
            "gssencmode": _choice("GSSAPI encryption", None, "disable", "prefer", "require"),
            "hostaddr": _field("Host address", "Numeric, saves looking up the host."),
            "target_session_attrs": _choice(
                "Target session",
                "Of several hosts separated by commas, which to take: read-write finds the primary.",
                *("any", "read-write", "primary"),
            ),
            "load_balance_hosts": _choice("Balance hosts", "The order to try them in.", "disable", "random"),
            "connect_timeout": _number("Connect timeout", "Seconds."),
            "keepalives": _number("Keepalives", "0 switches them off.", minimum=0, maximum=1),
            "keepalives_idle": _number("Keepalives: idle", "Seconds before the first one."),
            "keepalives_interval": _number("Keepalives: interval", "Seconds between two."),
            "keepalives_count": _number("Keepalives: count", "How many lost ones end the connection."),
            "tcp_user_timeout": _number("TCP user timeout", "Milliseconds without an acknowledgement."),
            "application_name": _field("Application name", "What pg_stat_activity shows."),
            "statement_timeout": _field("Statement timeout", "Milliseconds, or with a unit, such as 30s."),
            "lock_timeout": _field("Lock timeout", "Milliseconds, or with a unit, such as 5s."),
            "isolation_level": _choice(
                "Isolation level", None, "read committed", "repeatable read", "serializable"
            ),
            "transaction_pooler": _field(
                "Transaction pooler",
                "A pooler such as PgBouncer in transaction mode stands before the database.",
                type="boolean",
            ),
            "poll_seconds": _field(
                "Poll interval",
                "Seconds between two looks at a queue where no notification arrives.",
                type="number",
                exclusiveMinimum=0,
                maximum=3600,
            ),
        },
    }


def _choice(label: str, description: str | None, *values: str) -> dict[str, Any]:
    return _field(label, description, enum=[*values, None])


def _number(label: str, description: str, minimum: int = 1, **schema: Any) -> dict[str, Any]:
    return _field(label, description, type="integer", minimum=minimum, **schema)


def _field(label: str, description: str | None, *, type: str = "string", **schema: Any) -> dict[str, Any]:
    # Every field may stay empty: there is a default for each.
    field: dict[str, Any] = {"label": label, "schema": {"type": [type, "null"], **schema}}
    return field | ({"description": description} if description else {})
