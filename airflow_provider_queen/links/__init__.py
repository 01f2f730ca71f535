"""Links from Airflow's task pages."""
