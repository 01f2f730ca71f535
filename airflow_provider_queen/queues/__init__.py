"""Queen for Airflow's common messaging."""
