-- What of v2's rows could not be taken over, and the leases that somebody works under at this moment.
SELECT
    has_database_privilege(current_database(), 'CREATE') AS may_create,
    (SELECT count(*) FROM queen.messages AS m WHERE m.created_at IS NULL) AS without_time,
    (
        SELECT count(*) FROM queen.messages AS m
        WHERE NOT EXISTS (
            SELECT 1 FROM queen.partitions AS p INNER JOIN queen.queues AS q ON q.id = p.queue_id
            WHERE p.id = m.partition_id
        )
    ) AS without_queue,
    (SELECT count(*) FROM queen.queues AS q WHERE q.name = '')
    + (SELECT count(*) FROM queen.partitions AS p WHERE p.name = '')
    + (SELECT count(*) FROM queen.consumer_groups AS g WHERE g.name = '') AS without_name,
    (
        SELECT count(*) FROM queen.partition_leases AS l
        WHERE l.released_at IS NULL AND l.lease_expires_at > clock_timestamp()
    ) AS running;
