from __future__ import annotations

from tests.airflow_tasks import figures as figures
from tests.airflow_tasks import hook as hook
from tests.airflow_tasks import tasks_dsn as tasks_dsn
