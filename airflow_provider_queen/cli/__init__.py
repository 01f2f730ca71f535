"""``airflow queen``."""
