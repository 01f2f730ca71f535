-- Depth and statistics: arithmetic on cursors, never a count of messages.

-- Per lane that may hold something for a group, in one snapshot. Drained lanes are not visited: by their definition
-- they hold nothing. Lanes that the group has not met yet count from where it would begin.
CREATE OR REPLACE FUNCTION queen.group_backlog(queue_id integer, consumer_group text)
RETURNS TABLE (lane_id bigint, next_seq bigint, pending bigint, in_flight bigint)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET enable_hashjoin = OFF
SET enable_mergejoin = OFF
SET jit = OFF
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    SELECT
        e.lane_id,
        e.from_seq + 1,
        e.last_seq - e.from_seq - e.settled_ahead,
        CASE WHEN e.lease_expires_at > clock_timestamp() THEN queen.size(queen.beyond(e.from_seq, e.held)) ELSE 0 END
    FROM (
        SELECT
            b.*,
            CASE
                WHEN b.ahead IS NULL OR isempty(b.ahead) THEN 0
                ELSE queen.size(queen.beyond(b.from_seq, b.ahead))
            END AS settled_ahead
        FROM (
            SELECT
                c.lane_id,
                s.ahead,
                s.held,
                s.lease_expires_at,
                coalesce(t.seq, l.floor_seq) AS last_seq,
                CASE
                    WHEN s.ahead IS NULL OR isempty(s.ahead) THEN greatest(coalesce(s.cursor, c.start_seq), l.floor_seq)
                    ELSE queen.fold(greatest(s.cursor, l.floor_seq), s.ahead)
                END AS from_seq
            FROM queen.consumers AS c
            CROSS JOIN LATERAL (SELECT r.floor_seq FROM queen.lanes AS r WHERE r.id = c.lane_id LIMIT 1) AS l
            LEFT JOIN LATERAL (
                SELECT r.cursor, r.ahead, r.held, r.lease_expires_at FROM queen.consumer_states AS r
                WHERE r.consumer_id = c.id ORDER BY r.gen DESC LIMIT 1
            ) AS s ON TRUE
            LEFT JOIN LATERAL (
                SELECT m.seq FROM queen.message_log AS m WHERE m.lane_id = c.lane_id ORDER BY m.seq DESC LIMIT 1
            ) AS t ON TRUE
            WHERE
                c.queue_id = group_backlog.queue_id AND c.consumer_group = group_backlog.consumer_group
                AND c.ready_at IS NOT NULL
        ) AS b
    ) AS e
    WHERE e.last_seq - e.from_seq - e.settled_ahead > 0
    UNION ALL
    SELECT n.id, n.start_seq + 1, n.last_seq - n.start_seq, 0
    FROM (
        SELECT
            l.id,
            queen.start_seq(queen.subscription_of(group_backlog.consumer_group, q, l.name), l) AS start_seq,
            coalesce(t.seq, l.floor_seq) AS last_seq
        FROM queen.queues AS q
        INNER JOIN queen.lanes AS l ON l.queue_id = q.id
        LEFT JOIN LATERAL (
            SELECT g.discovered_xid FROM queen.queue_groups AS g
            WHERE g.queue_id = q.id AND g.consumer_group = group_backlog.consumer_group
        ) AS known ON TRUE
        LEFT JOIN LATERAL (
            SELECT m.seq FROM queen.message_log AS m WHERE m.lane_id = l.id ORDER BY m.seq DESC LIMIT 1
        ) AS t ON TRUE
        WHERE
            q.id = group_backlog.queue_id
            AND l.created_xid >= CASE
                WHEN known.discovered_xid <= pg_snapshot_xmax(pg_current_snapshot()) THEN known.discovered_xid ELSE '0'
            END
            AND (
                SELECT c.id FROM queen.consumers AS c
                WHERE c.lane_id = l.id AND c.consumer_group = group_backlog.consumer_group
                LIMIT 1
            ) IS NULL
    ) AS n
    WHERE n.last_seq > n.start_seq;
END
$$;

-- What max_queue_size counts: what the slowest group has not settled, or all retained messages where there is no group.
CREATE OR REPLACE FUNCTION queen.largest_backlog(queue_id integer)
RETURNS bigint
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT coalesce(
        (
            SELECT max((SELECT coalesce(sum(b.pending), 0) FROM queen.group_backlog(q.id, g.consumer_group) AS b))
            FROM queen.queues AS q
            CROSS JOIN LATERAL queen.groups_of(q) AS g (consumer_group)
            WHERE q.id = largest_backlog.queue_id
        ),
        (SELECT sum(b.pending) FROM queen.group_backlog(largest_backlog.queue_id, '') AS b),
        0
    )::bigint;
$$;

-- Pending (in flight included), in flight, dead letters that were not requeued, and the age of the oldest pending
-- message, of one group over a queue, or over all queues of a namespace and/or task. Exact: one statement, one
-- snapshot.
CREATE OR REPLACE FUNCTION queen.depth(
    queue_name text DEFAULT NULL, consumer_group text DEFAULT NULL, namespace text DEFAULT NULL, task text DEFAULT NULL
)
RETURNS TABLE (pending bigint, in_flight bigint, dead_letters bigint, oldest_age_seconds double precision)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
#variable_conflict use_column
DECLARE
    reader CONSTANT text := coalesce(depth.consumer_group, '__QUEUE_MODE__');
BEGIN
    IF (depth.queue_name IS NULL) = (depth.namespace IS NULL AND depth.task IS NULL) THEN
        PERFORM queen.raise_invalid('a depth is of a queue, or of a namespace and/or a task, and not both');
    ELSIF depth.queue_name IS NOT NULL THEN
        PERFORM queen.queue_id_of(depth.queue_name);
    END IF;
    RETURN QUERY
    SELECT
        coalesce(sum(b.pending), 0)::bigint,
        coalesce(sum(b.in_flight), 0)::bigint,
        coalesce(sum(b.dead_letters), 0)::bigint,
        CASE
            WHEN min(b.oldest) IS NOT NULL
                THEN greatest(extract(EPOCH FROM clock_timestamp() - min(b.oldest)), 0)::double precision
        END
    FROM queen.queues AS q
    CROSS JOIN LATERAL (
        SELECT
            sum(g.pending) AS pending,
            sum(g.in_flight) AS in_flight,
            min(
                (SELECT m.created_at FROM queen.message_log AS m WHERE m.lane_id = g.lane_id AND m.seq = g.next_seq)
            ) AS oldest,
            (
                SELECT count(*) FROM queen.dead_letter_queue AS d
                WHERE d.queue_id = q.id AND d.consumer_group = reader AND d.requeued_at IS NULL
            ) AS dead_letters
        FROM queen.group_backlog(q.id, reader) AS g
    ) AS b
    WHERE
        (depth.queue_name IS NULL OR q.name = depth.queue_name)
        AND (depth.namespace IS NULL OR q.namespace = depth.namespace)
        AND (depth.task IS NULL OR q.task = depth.task);
END
$$;

-- The rows a dashboard needs: one per partition, priority and group; consumer_group is NULL where no group reads yet.
CREATE OR REPLACE FUNCTION queen.stats(queue_name text DEFAULT NULL)
RETURNS SETOF queen.partition_stats
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET jit = OFF
AS $$
#variable_conflict use_column
BEGIN
    IF stats.queue_name IS NOT NULL THEN
        PERFORM queen.queue_id_of(stats.queue_name);
    END IF;
    RETURN QUERY
    SELECT
        q.name,
        q.namespace,
        q.task,
        l.name,
        l.priority,
        g.consumer_group,
        l.floor_seq + 1,
        coalesce(t.seq, l.floor_seq),
        coalesce(t.seq, l.floor_seq) - l.floor_seq,
        coalesce(p.cursor, n.start_seq),
        coalesce(p.pending, coalesce(t.seq, l.floor_seq) - n.start_seq),
        CASE WHEN p.lease_expires_at > clock_timestamp() THEN queen.size(p.held) ELSE 0 END,
        p.lease_expires_at,
        p.ready_at,
        CASE
            WHEN coalesce(p.pending, coalesce(t.seq, l.floor_seq) - n.start_seq) > 0
                THEN greatest(
                    extract(EPOCH FROM clock_timestamp() - (
                        SELECT m.created_at FROM queen.message_log AS m
                        WHERE m.lane_id = l.id AND m.seq = coalesce(p.cursor, n.start_seq) + 1
                    )), 0
                )::double precision
        END,
        (
            SELECT count(*) FROM queen.dead_letter_queue AS d
            WHERE
                d.queue_id = q.id AND d.requeued_at IS NULL AND d.lane_id = l.id
                AND (g.consumer_group IS NULL OR d.consumer_group = g.consumer_group)
        ),
        coalesce(p.total_completed, 0),
        coalesce(p.total_dropped, 0),
        coalesce(t.created_at, nullif(l.floor_created_at, '-infinity')),
        p.settled_at
    FROM queen.queues AS q
    INNER JOIN queen.lanes AS l ON l.queue_id = q.id
    LEFT JOIN LATERAL queen.groups_of(q) AS g (consumer_group) ON TRUE
    LEFT JOIN queen.partition_consumers AS p ON p.lane_id = l.id AND p.consumer_group = g.consumer_group
    LEFT JOIN LATERAL (
        SELECT m.seq, m.created_at FROM queen.message_log AS m WHERE m.lane_id = l.id ORDER BY m.seq DESC LIMIT 1
    ) AS t ON TRUE
    CROSS JOIN LATERAL (
        SELECT CASE WHEN p.id IS NULL THEN
            queen.start_seq(queen.subscription_of(g.consumer_group, q, l.name), l)
        END AS start_seq
    ) AS n
    WHERE stats.queue_name IS NULL OR q.name = stats.queue_name
    ORDER BY q.name, l.name, l.priority DESC, g.consumer_group;
END
$$;
