"""``make demo`` and ``make ui``: the whole of it on one machine, from nothing, and nothing left afterwards.

The process that the user starts (``__main__``) imports no Airflow. It owns a temporary folder and an embedded
PostgreSQL, and starts a worker (``worker``) in a session of its own, which runs the Dags and, for the UI,
Airflow's processes. Whatever happens, ending that session and the folder ends everything.
"""
