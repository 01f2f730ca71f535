-- Opens every run of the schema runner; the first statements of its one transaction.

-- Each statement must see what was committed before it, above all the statements after the wait for the lock:
-- under repeatable read the loser of a race would still see the schema as it was before the winner's commit.
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;

-- Waiting for another run is not an error, however long its index builds take: lock_timeout also counts for
-- advisory locks, so it is off until the lock is held. A lock of the transaction, not of the session: it ends with
-- the transaction whatever happens to the client, and it works behind a transaction pooler.
SET LOCAL statement_timeout = 0;
SET LOCAL lock_timeout = 0;
SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended('airflow_provider_queen.client.schema', 0));

-- From here on we wait for readers and writers of the tables. Everybody who comes after us queues behind our
-- pending ACCESS EXCLUSIVE lock, so one long report must not stop the queue for longer than this.
SET LOCAL lock_timeout = '30s';

-- An unqualified name fails instead of landing in somebody's schema.
SET LOCAL search_path = pg_catalog, pg_temp;
