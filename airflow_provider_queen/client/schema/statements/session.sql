-- For the part of an upgrade from v2 that is many transactions: one run at a time, as begin.sql does for one.
SET statement_timeout = 0;
SET lock_timeout = 0;
SELECT pg_catalog.pg_advisory_lock(pg_catalog.hashtextextended('airflow_provider_queen.client.schema', 0));
-- Whoever writes to v2's tables queues behind us while we wait for the triggers' lock.
SET lock_timeout = '3s';
SET search_path = pg_catalog, pg_temp;
-- What a crash takes back is copied again.
SET synchronous_commit = OFF;
