"""Options by name, from an allow-list."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from airflow_provider_queen.client.options import ClientOptions, RetryPolicy
from airflow_provider_queen.client.sessions import Target
from airflow_provider_queen.exceptions import InvalidOptionError


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"statement_timout": 5}, "'statement_timout'; the nearest is 'statement_timeout'"),
        ({"options": "-c search_path=x"}, "unknown client option 'options'"),
        ({"retry": 5}, "unknown client option 'retry'"),
        ({"statement_timeout": -1}, "statement_timeout is -1"),
        ({"statement_timeout": True}, "statement_timeout is True"),
        ({"lock_timeout": "5 parsecs"}, "lock_timeout is '5 parsecs'"),
        ({"lock_timeout": "1'; DROP"}, "lock_timeout is"),
        ({"isolation_level": "serialisable"}, "the nearest is 'serializable'"),
        ({"isolation_level": "read uncommitted"}, "the nearest is 'read committed'"),
        ({"transaction_pooler": "yes"}, "transaction_pooler is 'yes'"),
        ({"poll_seconds": 0}, "poll_seconds is 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        ClientOptions.from_mapping(options)


def test_settings_are_made_for_the_session_or_for_each_transaction() -> None:
    wanted = {"statement_timeout": 500, "lock_timeout": "2s", "isolation_level": "serializable"}
    session = Target("host=h", ClientOptions(**wanted))
    assert dict(session.session_settings)["default_transaction_isolation"] == "serializable"
    assert session.transaction_settings == ()
    pooled = Target("host=h", ClientOptions(**wanted, transaction_pooler=True))
    assert pooled.session_settings == ()
    assert dict(pooled.transaction_settings)["lock_timeout"] == "2s"
    assert pooled.isolation_level == psycopg.IsolationLevel.SERIALIZABLE
    assert pooled.connect_arguments["prepare_threshold"] is None


def test_backoff_doubles_up_to_its_cap_and_ends() -> None:
    policy = RetryPolicy(attempts=5, first_delay=1, longest_delay=3, random=lambda: 1.0)
    assert [policy.delay(attempt) for attempt in range(1, 6)] == [1, 2, 3, 3, None]
    assert RetryPolicy(first_delay=1, random=lambda: 0.0).delay(1) == 0.5


def test_a_target_shows_no_password() -> None:
    target = Target("postgresql://queen:s3cret@db:5433/app", ClientOptions())
    assert str(target) == "host=db port=5433 dbname=app user=queen"
    assert "s3cret" not in repr(target)


def test_a_connection_string_that_libpq_refuses_is_not_quoted() -> None:
    with pytest.raises(InvalidOptionError, match="none that libpq understands") as caught:
        Target("host=db password='s3cret", ClientOptions())
    assert caught.value.__context__ is None
