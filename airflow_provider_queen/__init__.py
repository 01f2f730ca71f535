"""Queen for Airflow: partitioned FIFO queues with consumer groups, inside PostgreSQL."""

__version__ = "0.1.0"
