-- Upgrade from v2, second part: what consumers have done, by v2's rules. For a message and a group the first that
-- holds:
--   1. a row of messages_status: completed, dead_letter and evicted are settled, failed too once its retries are used
--      up (that one becomes a dead letter, or counts as dropped where the queue keeps none); any other status is
--      pending, wherever the cursor is: at worst a message is delivered twice, none is lost
--   2. a dead letter is settled
--   3. what the cursor has passed is settled, in the order (created_at, id)
--   4. what is older than the group's subscription is not the group's
--   5. the rest is pending
-- Where v2 allows two rows for one fact (its unique indexes let NULL groups through), one of them counts.

CREATE VIEW queen_v2.options AS
SELECT
    m.id,
    q.id AS v2_id,
    coalesce(q.retry_limit, 3) AS retry_limit,
    coalesce(q.dlq_after_max_retries, FALSE) OR coalesce(q.dead_letter_queue, FALSE) AS keeps_dead_letters
FROM queen.queues AS q
INNER JOIN queen_v2.queue_map AS m ON m.v2_id = q.id;

CREATE VIEW queen_v2.all_statuses AS
SELECT DISTINCT ON (m.lane_id, m.seq, coalesce(s.consumer_group, '__QUEUE_MODE__'))
    m.lane_id,
    m.seq,
    coalesce(s.consumer_group, '__QUEUE_MODE__') AS consumer_group,
    coalesce(s.retry_count, 0) AS retry_count,
    s.error_message,
    CASE WHEN s.status = 'evicted' THEN 'evicted' ELSE 'failed' END AS reason,
    coalesce(s.failed_at, s.completed_at, s.created_at, now()) AS ended_at,
    s.status IN ('completed', 'dead_letter', 'evicted') OR f.is_final AS is_settled,
    s.status IN ('dead_letter', 'evicted') OR (f.is_final AND o.keeps_dead_letters) AS is_dead,
    f.is_final AND NOT o.keeps_dead_letters AS is_dropped
FROM queen.messages_status AS s
INNER JOIN queen_v2.message_map AS m ON m.v2_id = s.message_id
INNER JOIN queen_next.lanes AS l ON l.id = m.lane_id
INNER JOIN queen_v2.options AS o ON o.id = l.queue_id
CROSS JOIN LATERAL (SELECT s.status = 'failed' AND coalesce(s.retry_count, 0) >= o.retry_limit AS is_final) AS f
ORDER BY m.lane_id, m.seq, 3, s.status = 'completed' DESC, s.created_at DESC, s.id;

CREATE VIEW queen_v2.cursors AS
SELECT DISTINCT ON (p.id, coalesce(c.consumer_group, '__QUEUE_MODE__'))
    p.id * 10 AS lane_id,
    coalesce(c.consumer_group, '__QUEUE_MODE__') AS consumer_group,
    c.last_consumed_created_at,
    c.last_consumed_id,
    coalesce(c.total_messages_consumed, 0) AS total_messages_consumed,
    c.last_consumed_at
FROM queen.partition_cursors AS c
INNER JOIN queen_v2.partition_map AS p ON p.v2_id = c.partition_id
ORDER BY p.id, 2, c.last_consumed_created_at NULLS FIRST, c.last_consumed_id NULLS FIRST;

CREATE VIEW queen_v2.live_leases AS
SELECT DISTINCT ON (p.id, coalesce(l.consumer_group, '__QUEUE_MODE__'))
    p.id * 10 AS lane_id,
    coalesce(l.consumer_group, '__QUEUE_MODE__') AS consumer_group,
    l.lease_expires_at,
    l.message_batch,
    coalesce(l.batch_size, 0) AS batch_size,
    coalesce(l.created_at, now()) AS created_at
FROM queen.partition_leases AS l
INNER JOIN queen_v2.partition_map AS p ON p.v2_id = l.partition_id
WHERE l.released_at IS NULL AND l.lease_expires_at > now()
ORDER BY p.id, 2, l.lease_expires_at DESC;

CREATE VIEW queen_v2.all_dead_letters AS
SELECT DISTINCT ON (m.lane_id, m.seq, coalesce(d.consumer_group, '__QUEUE_MODE__'))
    m.lane_id,
    m.seq,
    coalesce(d.consumer_group, '__QUEUE_MODE__') AS consumer_group,
    d.error_message,
    coalesce(d.retry_count, 0) AS retry_count,
    d.original_created_at,
    coalesce(d.failed_at, now()) AS failed_at
FROM queen.dead_letter_queue AS d
INNER JOIN queen_v2.message_map AS m ON m.v2_id = d.message_id
ORDER BY m.lane_id, m.seq, 3, d.failed_at, d.id;

-- The two large ones, as rows: they are asked more than once.
CREATE TABLE queen_v2.statuses AS TABLE queen_v2.all_statuses WITH NO DATA;
CREATE INDEX ON queen_v2.statuses (lane_id, consumer_group, seq);
CREATE TABLE queen_v2.dead_letters AS TABLE queen_v2.all_dead_letters WITH NO DATA;
CREATE INDEX ON queen_v2.dead_letters (lane_id, consumer_group, seq);

-- Who has left a trace in a partition.
CREATE VIEW queen_v2.met AS
SELECT c.lane_id, c.consumer_group FROM queen_v2.cursors AS c
UNION
SELECT p.id * 10 AS lane_id, coalesce(l.consumer_group, '__QUEUE_MODE__') AS consumer_group
FROM queen.partition_leases AS l INNER JOIN queen_v2.partition_map AS p ON p.v2_id = l.partition_id
UNION
SELECT s.lane_id, s.consumer_group FROM queen_v2.statuses AS s
UNION
SELECT p.id * 10 AS lane_id, coalesce(d.consumer_group, '__QUEUE_MODE__') AS consumer_group
FROM queen.dead_letter_queue AS d INNER JOIN queen_v2.partition_map AS p ON p.v2_id = d.partition_id;

CREATE VIEW queen_v2.subscriptions AS
SELECT
    o.id AS queue_id,
    g.name AS consumer_group,
    g.subscription_start_from,
    coalesce(g.created_at, now()) AS created_at
FROM queen.consumer_groups AS g
INNER JOIN queen_v2.options AS o ON o.v2_id = g.queue_id;

-- The first `wanted` of a set of numbers, which a multirange has in order.
CREATE FUNCTION queen_v2.first_of(numbers int8multirange, wanted bigint)
RETURNS int8multirange
LANGUAGE sql IMMUTABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(range_agg(int8range(f.n, f.n, '[]')), '{}')
    FROM (
        SELECT g.n
        FROM unnest(numbers) AS r
        CROSS JOIN LATERAL generate_series(lower(r), upper(r) - 1) AS g (n)
        LIMIT greatest(wanted, 0)
    ) AS f;
$$;

-- The last seq of a partition that lies at or before a place in v2's order.
CREATE FUNCTION queen_v2.seq_at(partition_id uuid, at_created_at timestamptz, at_id uuid)
RETURNS bigint
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT m.seq
    FROM queen.messages AS v
    INNER JOIN queen_v2.message_map AS m ON m.v2_id = v.id
    WHERE v.partition_id = seq_at.partition_id AND (v.created_at, v.id) <= (at_created_at, at_id)
    ORDER BY v.created_at DESC, v.id DESC
    LIMIT 1;
$$;

-- Consumers, their states, failures, leases and dead letters, and v2's own count of what is pending: of all partitions,
-- or again of those that changed since.
CREATE FUNCTION queen_v2.copy_consumers(only_rewound boolean)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    lanes CONSTANT bigint[] := ARRAY(
        SELECT p.id * 10 FROM queen_v2.partition_map AS p WHERE p.is_rewound OR NOT copy_consumers.only_rewound
    );
BEGIN
    DELETE FROM queen_next.redeliveries AS r
    USING queen_next.consumers AS c WHERE c.id = r.consumer_id AND c.lane_id = ANY (lanes);
    DELETE FROM queen_next.consumer_states AS s
    USING queen_next.consumers AS c WHERE c.id = s.consumer_id AND c.lane_id = ANY (lanes);
    DELETE FROM queen_next.consumers AS c WHERE c.lane_id = ANY (lanes);
    DELETE FROM queen_next.dead_letter_queue AS d WHERE d.lane_id = ANY (lanes);
    DELETE FROM queen_v2.expected_pending AS e WHERE e.lane_id = ANY (lanes);
    DELETE FROM queen_v2.statuses AS s WHERE s.lane_id = ANY (lanes);
    DELETE FROM queen_v2.dead_letters AS d WHERE d.lane_id = ANY (lanes);
    INSERT INTO queen_v2.statuses SELECT s.* FROM queen_v2.all_statuses AS s WHERE s.lane_id = ANY (lanes);
    INSERT INTO queen_v2.dead_letters SELECT d.* FROM queen_v2.all_dead_letters AS d WHERE d.lane_id = ANY (lanes);
    ANALYZE queen_v2.statuses, queen_v2.dead_letters;

    INSERT INTO queen_next.consumers (lane_id, ready_at, start_seq, queue_id, priority, consumer_group)
    SELECT l.id, clock_timestamp(), 0, l.queue_id, 0, m.consumer_group
    FROM queen_v2.met AS m
    INNER JOIN queen_next.lanes AS l ON l.id = m.lane_id
    WHERE m.lane_id = ANY (lanes);

    INSERT INTO queen_next.consumer_states (
        consumer_id, gen, cursor, ahead, total_completed, total_dropped, settled_at, redelivering
    )
    SELECT
        s.id, 1, f.cursor, s.settled * int8multirange(int8range(f.cursor + 1, NULL)),
        s.total_completed, s.dropped, s.settled_at, s.retried
    FROM (
        SELECT
            c.id,
            coalesce(k.total_messages_consumed, 0) AS total_completed,
            k.last_consumed_at AS settled_at,
            coalesce(t.dropped, 0) AS dropped,
            coalesce(t.retried, 0) AS retried,
            int8multirange(int8range(0, greatest(
                queen_v2.seq_at(p.v2_id, k.last_consumed_created_at, k.last_consumed_id),
                queen_v2.seq_at(p.v2_id, g.subscription_start_from, '00000000-0000-0000-0000-000000000000'),
                0
            ), '(]'))
            + coalesce(d.seqs, '{}') - coalesce(t.pending, '{}') + coalesce(t.settled, '{}') AS settled
        FROM queen_next.consumers AS c
        INNER JOIN queen_v2.partition_map AS p ON p.id = c.lane_id / 10
        LEFT JOIN queen_v2.cursors AS k ON k.lane_id = c.lane_id AND k.consumer_group = c.consumer_group
        LEFT JOIN queen_v2.subscriptions AS g ON g.queue_id = c.queue_id AND g.consumer_group = c.consumer_group
        LEFT JOIN (
            SELECT
                x.lane_id,
                x.consumer_group,
                range_agg(int8range(x.seq, x.seq, '[]')) FILTER (WHERE x.is_settled) AS settled,
                range_agg(int8range(x.seq, x.seq, '[]')) FILTER (WHERE NOT x.is_settled) AS pending,
                count(*) FILTER (WHERE x.is_dropped) AS dropped,
                count(*) FILTER (WHERE NOT x.is_settled AND x.retry_count > 0) AS retried
            FROM queen_v2.statuses AS x
            WHERE x.lane_id = ANY (lanes)
            GROUP BY x.lane_id, x.consumer_group
        ) AS t ON t.lane_id = c.lane_id AND t.consumer_group = c.consumer_group
        LEFT JOIN (
            SELECT x.lane_id, x.consumer_group, range_agg(int8range(x.seq, x.seq, '[]')) AS seqs
            FROM queen_v2.dead_letters AS x
            WHERE x.lane_id = ANY (lanes)
            GROUP BY x.lane_id, x.consumer_group
        ) AS d ON d.lane_id = c.lane_id AND d.consumer_group = c.consumer_group
        WHERE c.lane_id = ANY (lanes)
    ) AS s
    CROSS JOIN LATERAL (
        SELECT coalesce((SELECT upper(r) - 1 FROM unnest(s.settled) AS r WHERE r @> 1::bigint), 0) AS cursor
    ) AS f;

    INSERT INTO queen_next.redeliveries (consumer_id, seq, failures, error_message)
    SELECT c.id, s.seq, s.retry_count, s.error_message
    FROM queen_v2.statuses AS s
    INNER JOIN queen_next.consumers AS c ON c.lane_id = s.lane_id AND c.consumer_group = s.consumer_group
    WHERE s.lane_id = ANY (lanes) AND NOT s.is_settled AND s.retry_count > 0;

    -- A live lease goes on: nobody else gets its messages before it runs out. v2's worker has no token to settle them by.
    WITH leases AS MATERIALIZED ( -- each `held` is computed once
        SELECT
            c.id, l.lease_expires_at, l.created_at,
            CASE
                WHEN b.is_list
                    THEN p.pending * coalesce(
                        (
                            SELECT range_agg(int8range(m.seq, m.seq, '[]'))
                            FROM jsonb_array_elements(l.message_batch) AS e (entry)
                            CROSS JOIN LATERAL (
                                SELECT CASE jsonb_typeof(e.entry)
                                    WHEN 'string' THEN e.entry #>> '{}' ELSE e.entry ->> 'id'
                                END AS named
                            ) AS n
                            INNER JOIN queen_v2.message_map AS m
                                ON m.lane_id = l.lane_id
                                AND m.v2_id = CASE
                                    WHEN n.named ~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN n.named::uuid
                                END
                        ),
                        '{}'
                    )
                ELSE queen_v2.first_of(p.pending, l.batch_size)
            END AS held
        FROM queen_v2.live_leases AS l
        INNER JOIN queen_next.consumers AS c ON c.lane_id = l.lane_id AND c.consumer_group = l.consumer_group
        INNER JOIN queen_next.consumer_states AS x ON x.consumer_id = c.id
        INNER JOIN queen_v2.partition_map AS y ON y.id = l.lane_id / 10
        CROSS JOIN LATERAL (
            SELECT int8multirange(int8range(x.cursor, greatest(x.cursor, y.copied), '(]')) - x.ahead AS pending
        ) AS p
        CROSS JOIN LATERAL (SELECT coalesce(jsonb_typeof(l.message_batch), '') = 'array' AS is_list) AS b
        WHERE l.lane_id = ANY (lanes)
    )

    UPDATE queen_next.consumer_states AS s
    SET
        lease_id = (lpad(to_hex(s.consumer_id), 12, '0') || right(replace(gen_random_uuid()::text, '-', ''), 20))::uuid,
        lease_expires_at = h.lease_expires_at,
        popped_at = h.created_at,
        first_seq = lower(h.held),
        last_seq = upper(h.held) - 1,
        held = h.held,
        attempt = 1 + coalesce(
            (
                SELECT max(r.failures)
                FROM unnest(h.held) AS x
                INNER JOIN queen_next.redeliveries AS r
                    ON r.consumer_id = s.consumer_id AND r.seq >= lower(x) AND r.seq < upper(x)
            ),
            0
        )
    FROM leases AS h
    WHERE s.consumer_id = h.id AND NOT isempty(h.held);

    INSERT INTO queen_next.dead_letter_queue (
        queue_id, lane_id, seq, message_id, consumer_group, partition_name, priority, transaction_id, trace_id, payload,
        is_encrypted, reason, error_message, retry_count, original_created_at, failed_at
    )
    SELECT
        l.queue_id, l.id, m.seq, queen_v2.address(l.id, m.seq), d.consumer_group, l.name, 0, m.transaction_id, m.trace_id,
        m.payload, m.is_encrypted, d.reason, d.error_message, d.retry_count,
        coalesce(d.original_created_at, m.created_at), d.failed_at
    FROM (
        SELECT
            x.lane_id, x.seq, x.consumer_group, 'failed' AS reason, x.error_message, x.retry_count, x.original_created_at,
            x.failed_at
        FROM queen_v2.dead_letters AS x
        UNION ALL
        SELECT s.lane_id, s.seq, s.consumer_group, s.reason, s.error_message, s.retry_count, NULL, s.ended_at
        FROM queen_v2.statuses AS s
        WHERE
            s.is_dead
            AND NOT EXISTS (
                SELECT 1 FROM queen_v2.dead_letters AS x
                WHERE x.lane_id = s.lane_id AND x.seq = s.seq AND x.consumer_group = s.consumer_group
            )
    ) AS d
    INNER JOIN queen_next.lanes AS l ON l.id = d.lane_id
    INNER JOIN queen_next.message_log AS m ON m.lane_id = d.lane_id AND m.seq = d.seq
    WHERE d.lane_id = ANY (lanes)
    ORDER BY d.failed_at, d.lane_id, d.seq;

    -- v2's own answer, message by message, the rules written out once more: nothing here knows of cursors and multiranges.
    INSERT INTO queen_v2.expected_pending (lane_id, consumer_group, through_seq, pending)
    SELECT
        p.id * 10, g.consumer_group, p.copied,
        count(*) FILTER (
            WHERE m.seq IS NOT NULL AND CASE
                WHEN s.seq IS NOT NULL THEN NOT s.is_settled
                ELSE
                    d.seq IS NULL
                    AND coalesce((v.created_at, v.id) > (k.last_consumed_created_at, k.last_consumed_id), TRUE)
                    AND coalesce(v.created_at >= g.subscription_start_from, TRUE)
            END
        )
    FROM queen_v2.partition_map AS p
    INNER JOIN queen_next.lanes AS l ON l.id = p.id * 10
    INNER JOIN queen_v2.groups AS g ON g.queue_id = l.queue_id
    LEFT JOIN queen_v2.message_map AS m ON m.lane_id = l.id
    LEFT JOIN queen.messages AS v ON v.id = m.v2_id
    LEFT JOIN queen_v2.statuses AS s ON s.lane_id = l.id AND s.seq = m.seq AND s.consumer_group = g.consumer_group
    LEFT JOIN queen_v2.dead_letters AS d ON d.lane_id = l.id AND d.seq = m.seq AND d.consumer_group = g.consumer_group
    LEFT JOIN queen_v2.cursors AS k ON k.lane_id = l.id AND k.consumer_group = g.consumer_group
    WHERE l.id = ANY (lanes)
    GROUP BY p.id, p.copied, g.consumer_group;
    UPDATE queen_v2.partition_map AS p SET is_rewound = FALSE WHERE p.is_rewound;
END
$$;

-- Every group of a queue: those with a record, and those that left a trace.
CREATE VIEW queen_v2.groups AS
SELECT x.queue_id, x.consumer_group, s.subscription_start_from, coalesce(s.created_at, now()) AS created_at
FROM (
    SELECT l.queue_id, m.consumer_group
    FROM queen_v2.met AS m INNER JOIN queen_next.lanes AS l ON l.id = m.lane_id
    UNION
    SELECT g.queue_id, g.consumer_group FROM queen_v2.subscriptions AS g
) AS x
LEFT JOIN queen_v2.subscriptions AS s ON s.queue_id = x.queue_id AND s.consumer_group = x.consumer_group;
