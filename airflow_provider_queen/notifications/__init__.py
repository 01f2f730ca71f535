"""Airflow notifiers."""
