"""Servers and runtimes that the demo and the tests start for themselves. Production needs none of it."""

from __future__ import annotations

from airflow_provider_queen.exceptions import QueenError


class EmbeddedError(QueenError):
    """A server or runtime for the demo or the tests is missing or did not start; the message says more."""
