-- How much queen.evict would move now, per queue and group, without moving it. Partitions that a group has not met yet
-- are not counted; lanes with a live lease are left to their holders, as queen.evict leaves them.
CREATE OR REPLACE FUNCTION queen.evictable(queue_filter text)
RETURNS TABLE (queue_name text, consumer_group text, messages bigint)
LANGUAGE sql STABLE
AS $$
    SELECT
        q.name,
        c.consumer_group,
        sum(
            old.last_seq - c.cursor - queen.size(c.ahead * queen.span(c.cursor + 1, old.last_seq))
        )::bigint
    FROM queen.queues AS q
    INNER JOIN queen.partition_consumers AS c ON c.queue_name = q.name
    CROSS JOIN LATERAL (
        SELECT queen.seq_before(c.lane_id, clock_timestamp() - make_interval(secs => q.max_wait_time_seconds)) AS last_seq
    ) AS old
    WHERE
        q.max_wait_time_seconds > 0
        AND (queue_filter IS NULL OR q.name = queue_filter)
        AND old.last_seq > c.cursor
        AND (c.lease_expires_at IS NULL OR c.lease_expires_at <= clock_timestamp())
    GROUP BY q.name, c.consumer_group
    ORDER BY q.name, c.consumer_group;
$$;

-- The queues that evict at all.
CREATE OR REPLACE FUNCTION queen.evicting_queues(queue_filter text)
RETURNS TABLE (queue_name text)
LANGUAGE sql STABLE
AS $$
    SELECT q.name
    FROM queen.queues AS q
    WHERE q.max_wait_time_seconds > 0 AND (queue_filter IS NULL OR q.name = queue_filter)
    ORDER BY q.name;
$$;
