"""The queue from Python. Imports no Airflow and no Spark."""
