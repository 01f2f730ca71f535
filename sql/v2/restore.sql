-- The way back to v2, in the migration's transaction: v2's tables are made anew and filled from the present ones, with
-- what was pushed and consumed meanwhile. Rows that v2 had keep their ids, and their history where v2's tables were
-- kept.
--   priorities     v2 has none: the lanes of a partition become one order, by time
--   cursor         the last message before the first one that is not settled; what was settled beyond it gets a status
--   transaction id unique per partition here, everywhere in v2: a repeated one gets the message's id appended
-- The present tables are in queen_next by now, v2's are there and empty.
SET LOCAL work_mem = '256MB';
SET LOCAL jit = OFF;
ALTER TABLE queen.messages DISABLE TRIGGER USER;

-- Ids for what v2 has never seen.
INSERT INTO queen_v2.queue_map (v2_id, id)
SELECT gen_random_uuid(), q.id FROM queen_next.queues AS q
WHERE NOT EXISTS (SELECT 1 FROM queen_v2.queue_map AS m WHERE m.id = q.id);
INSERT INTO queen_v2.partition_map (v2_id, id)
SELECT gen_random_uuid(), p.id FROM queen_next.partitions AS p
WHERE NOT EXISTS (SELECT 1 FROM queen_v2.partition_map AS m WHERE m.id = p.id);
INSERT INTO queen_v2.message_map (v2_id, lane_id, seq)
SELECT queen_v2.address(l.lane_id, l.seq), l.lane_id, l.seq FROM queen_next.message_log AS l
WHERE NOT EXISTS (SELECT 1 FROM queen_v2.message_map AS m WHERE m.lane_id = l.lane_id AND m.seq = l.seq);

INSERT INTO queen.queues (
    id, name, namespace, task, priority, lease_time, retry_limit, retry_delay, max_size, ttl, dead_letter_queue,
    dlq_after_max_retries, delayed_processing, window_buffer, retention_seconds, completed_retention_seconds,
    retention_enabled, encryption_enabled, max_wait_time_seconds, max_queue_size, created_at
)
SELECT
    m.v2_id, q.name, q.namespace, q.task, q.priority, q.lease_time, q.retry_limit, q.retry_delay,
    coalesce(k.max_size, 10000), coalesce(k.ttl, 3600),
    CASE WHEN k.was_kept = q.dlq_after_max_retries THEN k.dead_letter_queue ELSE q.dlq_after_max_retries END,
    CASE WHEN k.was_kept = q.dlq_after_max_retries THEN k.dlq_after_max_retries ELSE q.dlq_after_max_retries END,
    q.delayed_processing, q.window_buffer, q.retention_seconds, q.completed_retention_seconds, q.retention_enabled,
    q.encryption_enabled, q.max_wait_time_seconds, least(q.max_queue_size, 2147483647), q.created_at
FROM queen_next.queues AS q
INNER JOIN queen_v2.queue_map AS m ON m.id = q.id
LEFT JOIN (
    SELECT x.*, coalesce(x.dlq_after_max_retries, FALSE) OR coalesce(x.dead_letter_queue, FALSE) AS was_kept
    FROM queen_v2.queues AS x
) AS k ON k.id = m.v2_id;

INSERT INTO queen.partitions (id, queue_id, name, created_at, last_activity)
SELECT
    m.v2_id, q.v2_id, p.name, p.created_at,
    coalesce(
        (
            SELECT max(l.created_at) FROM queen_next.message_log AS l
            WHERE l.lane_id BETWEEN p.id * 10 AND p.id * 10 + 9
        ),
        k.last_activity, p.created_at
    )
FROM queen_next.partitions AS p
INNER JOIN queen_v2.partition_map AS m ON m.id = p.id
INNER JOIN queen_v2.queue_map AS q ON q.id = p.queue_id
LEFT JOIN queen_v2.partitions AS k ON k.id = m.v2_id;

-- v2 orders by (created_at, id). Within a lane that must be the order of seqs, also where a clock stood still: what
-- came after v2's last message comes after it.
INSERT INTO queen.messages (id, transaction_id, trace_id, partition_id, payload, created_at, is_encrypted)
SELECT
    m.v2_id,
    CASE
        WHEN row_number() OVER (PARTITION BY l.transaction_id ORDER BY l.created_at, l.lane_id, l.seq) = 1
            THEN l.transaction_id
        ELSE left(l.transaction_id, 218) || '#' || m.v2_id
    END,
    l.trace_id, p.v2_id, l.payload::text::jsonb,
    CASE
        WHEN k.id IS NULL
            THEN greatest(
                l.created_at,
                t.created_at + interval '1 microsecond' * row_number() OVER (PARTITION BY l.lane_id ORDER BY l.seq)
            )
        ELSE l.created_at
    END,
    l.is_encrypted
FROM queen_next.message_log AS l
INNER JOIN queen_v2.message_map AS m ON m.lane_id = l.lane_id AND m.seq = l.seq
INNER JOIN queen_v2.partition_map AS p ON p.id = l.lane_id / 10
LEFT JOIN queen_v2.messages AS k ON k.id = m.v2_id
LEFT JOIN (
    SELECT x.partition_id, max(x.created_at) AS created_at FROM queen_v2.messages AS x GROUP BY x.partition_id
) AS t ON t.partition_id = p.v2_id;
ANALYZE queen.messages, queen_v2.message_map;

-- For each group what it has settled, lane by lane.
CREATE TABLE queen_v2.readers AS
SELECT
    c.id AS consumer_id,
    c.lane_id,
    p.v2_id AS partition_id,
    c.consumer_group,
    int8multirange(int8range(0, greatest(coalesce(s.cursor, c.start_seq), l.floor_seq), '(]'))
    + coalesce(s.ahead, '{}') AS settled,
    coalesce(s.total_completed, 0) AS total_completed,
    s.settled_at,
    s.lease_expires_at,
    s.popped_at,
    coalesce(s.held, '{}') AS held,
    l.floor_created_at
FROM queen_next.consumers AS c
INNER JOIN queen_next.lanes AS l ON l.id = c.lane_id
INNER JOIN queen_v2.partition_map AS p ON p.id = c.lane_id / 10
LEFT JOIN LATERAL (
    SELECT x.* FROM queen_next.consumer_states AS x WHERE x.consumer_id = c.id ORDER BY x.gen DESC LIMIT 1
) AS s ON TRUE;
-- As rows: a set with thousands of gaps would be unpacked for each message that is looked up in it.
CREATE TABLE queen_v2.settled_ranges AS
SELECT r.consumer_id, lower(x) AS first_seq, upper(x) - 1 AS last_seq
FROM queen_v2.readers AS r
CROSS JOIN LATERAL unnest(r.settled) AS x;
CREATE INDEX ON queen_v2.settled_ranges (consumer_id, first_seq);
CREATE FUNCTION queen_v2.is_settled(consumer_id bigint, seq bigint)
RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT coalesce(
        (
            SELECT x.last_seq >= is_settled.seq FROM queen_v2.settled_ranges AS x
            WHERE x.consumer_id = is_settled.consumer_id AND x.first_seq <= is_settled.seq
            ORDER BY x.first_seq DESC
            LIMIT 1
        ),
        FALSE
    );
$$;
ANALYZE queen_v2.readers, queen_v2.settled_ranges;

CREATE TABLE queen_v2.first_pending AS
SELECT DISTINCT ON (r.partition_id, r.consumer_group) r.partition_id, r.consumer_group, v.created_at, v.id
FROM (
    SELECT x.partition_id, x.consumer_group FROM queen_v2.readers AS x GROUP BY x.partition_id, x.consumer_group
) AS r
INNER JOIN queen.messages AS v ON v.partition_id = r.partition_id
INNER JOIN queen_v2.message_map AS m ON m.v2_id = v.id
LEFT JOIN queen_v2.readers AS y ON y.lane_id = m.lane_id AND y.consumer_group = r.consumer_group
WHERE NOT queen_v2.is_settled(y.consumer_id, m.seq)
ORDER BY r.partition_id, r.consumer_group, v.created_at, v.id;

INSERT INTO queen.partition_cursors (
    partition_id, consumer_group, last_consumed_created_at, last_consumed_id, total_messages_consumed, last_consumed_at
)
SELECT
    r.partition_id, r.consumer_group,
    -- Without a message left: after all that retention has removed.
    coalesce(t.created_at, CASE WHEN f.id IS NULL THEN r.floor_created_at END),
    coalesce(
        t.id,
        CASE WHEN f.id IS NULL AND r.floor_created_at IS NOT NULL THEN 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid END
    ),
    r.total_completed, r.settled_at
FROM (
    SELECT
        x.partition_id, x.consumer_group, sum(x.total_completed)::bigint AS total_completed,
        max(x.settled_at) AS settled_at, max(nullif(x.floor_created_at, '-infinity')) AS floor_created_at
    FROM queen_v2.readers AS x
    GROUP BY x.partition_id, x.consumer_group
) AS r
LEFT JOIN queen_v2.first_pending AS f ON f.partition_id = r.partition_id AND f.consumer_group = r.consumer_group
LEFT JOIN LATERAL (
    SELECT v.created_at, v.id FROM queen.messages AS v
    WHERE v.partition_id = r.partition_id AND (f.id IS NULL OR (v.created_at, v.id) < (f.created_at, f.id))
    ORDER BY v.created_at DESC, v.id DESC
    LIMIT 1
) AS t ON TRUE;

-- A status where the cursor does not tell: settled beyond it, failed before, or where v2 had one that says something
-- else.
INSERT INTO queen.messages_status (
    message_id, consumer_group, status, worker_id, locked_at, completed_at, failed_at, error_message, retry_count,
    processing_at, created_at
)
SELECT
    m.v2_id,
    nullif(r.consumer_group, '__QUEUE_MODE__'),
    CASE
        WHEN NOT t.is_settled THEN 'pending'
        WHEN d.is_dead THEN 'dead_letter'
        ELSE 'completed'
    END,
    k.worker_id, k.locked_at,
    CASE WHEN t.is_settled AND d.is_dead IS NOT TRUE THEN coalesce(k.completed_at, r.settled_at, now()) END,
    k.failed_at, coalesce(e.error_message, k.error_message),
    CASE WHEN t.is_settled THEN coalesce(k.retry_count, 0) ELSE coalesce(e.failures, 0) END,
    k.processing_at, coalesce(k.created_at, now())
FROM queen_v2.readers AS r
INNER JOIN queen_v2.message_map AS m ON m.lane_id = r.lane_id
INNER JOIN queen.messages AS v ON v.id = m.v2_id
INNER JOIN queen_next.lanes AS l ON l.id = r.lane_id
INNER JOIN queen_next.queues AS q ON q.id = l.queue_id
CROSS JOIN LATERAL (SELECT queen_v2.is_settled(r.consumer_id, m.seq) AS is_settled) AS t
LEFT JOIN queen_next.consumer_groups_metadata AS s
    ON s.consumer_group = r.consumer_group AND s.queue_name = q.name AND s.partition_name IS NULL
LEFT JOIN queen_v2.first_pending AS f ON f.partition_id = r.partition_id AND f.consumer_group = r.consumer_group
LEFT JOIN queen_next.redeliveries AS e ON e.consumer_id = r.consumer_id AND e.seq = m.seq
LEFT JOIN (
    SELECT DISTINCT x.lane_id, x.seq, x.consumer_group, TRUE AS is_dead
    FROM queen_next.dead_letter_queue AS x
    WHERE x.requeued_at IS NULL
) AS d ON d.lane_id = m.lane_id AND d.seq = m.seq AND d.consumer_group = r.consumer_group
LEFT JOIN (
    SELECT DISTINCT ON (x.message_id, coalesce(x.consumer_group, '__QUEUE_MODE__')) x.*
    FROM queen_v2.messages_status AS x
    ORDER BY
        x.message_id, coalesce(x.consumer_group, '__QUEUE_MODE__'), x.status = 'completed' DESC, x.created_at DESC, x.id
) AS k ON k.message_id = m.v2_id AND coalesce(k.consumer_group, '__QUEUE_MODE__') = r.consumer_group
WHERE
    k.id IS NOT NULL OR e.seq IS NOT NULL
    -- Pending in spite of its dead letter, or though it is older than the subscription.
    OR (NOT t.is_settled AND (d.is_dead OR v.created_at < s.subscription_timestamp))
    OR (t.is_settled AND (v.created_at, v.id) > (f.created_at, f.id));

INSERT INTO queen.partition_leases (
    partition_id, consumer_group, lease_expires_at, message_batch, batch_size, acked_count, created_at
)
SELECT
    r.partition_id, r.consumer_group, max(r.lease_expires_at), jsonb_agg(m.v2_id ORDER BY m.lane_id, m.seq),
    count(*), 0, min(r.popped_at)
FROM queen_v2.readers AS r
INNER JOIN queen_v2.message_map AS m ON m.lane_id = r.lane_id AND r.held @> m.seq
INNER JOIN queen.messages AS v ON v.id = m.v2_id
WHERE r.lease_expires_at > now()
GROUP BY r.partition_id, r.consumer_group;

INSERT INTO queen.consumer_groups (queue_id, name, created_at, subscription_start_from, active, last_seen_at)
SELECT
    q.v2_id, g.consumer_group, coalesce(k.created_at, g.created_at),
    CASE WHEN s.subscription_mode = 'all' THEN NULL ELSE s.subscription_timestamp END,
    coalesce(k.active, TRUE), k.last_seen_at
FROM queen_next.queue_groups AS g
INNER JOIN queen_v2.queue_map AS q ON q.id = g.queue_id
INNER JOIN queen_next.queues AS n ON n.id = g.queue_id
LEFT JOIN queen_v2.consumer_groups AS k ON k.queue_id = q.v2_id AND k.name = g.consumer_group
LEFT JOIN queen_next.consumer_groups_metadata AS s
    ON s.consumer_group = g.consumer_group AND s.queue_name = n.name AND s.partition_name IS NULL
WHERE g.consumer_group <> '__QUEUE_MODE__' OR s.subscription_mode <> 'all' OR k.id IS NOT NULL;

-- v2 keeps no payload here: a dead letter whose message retention has removed stays as a record without one.
INSERT INTO queen.dead_letter_queue (
    message_id, partition_id, consumer_group, error_message, retry_count, original_created_at, failed_at
)
SELECT
    v.id, p.v2_id, nullif(d.consumer_group, '__QUEUE_MODE__'), d.error_message, d.retry_count, d.original_created_at,
    d.failed_at
FROM queen_next.dead_letter_queue AS d
INNER JOIN queen_v2.partition_map AS p ON p.id = d.lane_id / 10
LEFT JOIN queen_v2.message_map AS m ON m.lane_id = d.lane_id AND m.seq = d.seq
LEFT JOIN queen.messages AS v ON v.id = m.v2_id
WHERE d.requeued_at IS NULL;

INSERT INTO queen.retention_history (partition_id, messages_deleted, retention_type, executed_at)
SELECT p.v2_id, h.messages_deleted, h.retention_type, h.executed_at
FROM queen_next.retention_history AS h
INNER JOIN queen_v2.partition_map AS p ON p.id = h.lane_id / 10;

ALTER TABLE queen.messages ENABLE TRIGGER USER;
DROP SCHEMA queen_next CASCADE;
DROP SCHEMA queen_v2 CASCADE;
