-- The newest state of every group on every partition it has met: cursor, lease and exact depth.
CREATE VIEW queen.partition_consumers AS
SELECT
    c.id,
    q.name AS queue_name,
    l.name AS partition_name,
    c.lane_id,
    c.lane_id / 10 AS partition_id,
    c.priority,
    c.consumer_group,
    e.cursor,
    e.ahead,
    e.last_seq,
    e.last_seq - e.cursor - e.settled_ahead AS pending,
    s.lease_id,
    s.lease_expires_at,
    s.popped_at,
    s.first_seq AS lease_first_seq,
    s.last_seq AS lease_last_seq,
    -- What retention has removed nobody can hold.
    coalesce(s.held, '{}') * int8multirange(int8range(e.cursor + 1, NULL)) AS held,
    s.retry_at,
    c.ready_at,
    coalesce(s.total_completed, 0) AS total_completed,
    coalesce(s.total_dropped, 0) AS total_dropped,
    s.settled_at
FROM queen.consumers AS c
INNER JOIN queen.lanes AS l ON l.id = c.lane_id
INNER JOIN queen.queues AS q ON q.id = c.queue_id
LEFT JOIN LATERAL (
    SELECT n.*
    FROM queen.consumer_states AS n
    WHERE n.consumer_id = c.id
    ORDER BY n.gen DESC
    LIMIT 1
) AS s ON TRUE
LEFT JOIN LATERAL (
    SELECT m.seq
    FROM queen.message_log AS m
    WHERE m.lane_id = c.lane_id
    ORDER BY m.seq DESC
    LIMIT 1
) AS t ON TRUE
CROSS JOIN
    LATERAL (
        SELECT
            greatest(coalesce(s.cursor, c.start_seq), l.floor_seq) AS from_seq,
            coalesce(t.seq, l.floor_seq) AS last_seq
    ) AS b
-- Retention may have passed the cursor: what was settled ahead of it then folds into the effective cursor.
CROSS JOIN
    LATERAL (
        SELECT
            b.last_seq,
            coalesce(
                (SELECT upper(r) - 1 FROM unnest(s.ahead) AS r WHERE r @> (b.from_seq + 1)), b.from_seq
            ) AS cursor,
            coalesce(s.ahead, '{}') * int8multirange(int8range(b.from_seq + 1, NULL)) AS beyond
    ) AS f
CROSS JOIN LATERAL (
    SELECT
        f.cursor,
        f.last_seq,
        f.beyond * int8multirange(int8range(f.cursor + 1, NULL)) AS ahead,
        (
            SELECT coalesce(sum(upper(r) - lower(r)), 0)::bigint
            FROM unnest(f.beyond * int8multirange(int8range(f.cursor + 1, NULL))) AS r
        ) AS settled_ahead
) AS e;
COMMENT ON VIEW queen.partition_consumers IS 'Cursor, lease and pending of each group on each partition it has met.';
