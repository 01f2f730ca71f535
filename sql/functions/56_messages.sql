-- Looking at messages without consuming them.

-- Newest first, in pages: `after` is the id of the previous page's last row. A page costs the same however deep it is.
CREATE OR REPLACE FUNCTION queen.list_messages(
    queue_name text, partition text DEFAULT NULL, after uuid DEFAULT NULL, max_rows integer DEFAULT 100
)
RETURNS SETOF queen.messages
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
#variable_conflict use_column
DECLARE
    qid CONSTANT integer := queen.queue_id_of(list_messages.queue_name);
    after_lane CONSTANT bigint := queen.message_lane(list_messages.after);
    after_seq CONSTANT bigint := queen.message_seq(list_messages.after);
    after_at timestamptz;
BEGIN
    IF list_messages.max_rows IS NULL OR list_messages.max_rows < 1 THEN
        PERFORM queen.raise_invalid(format('a page has at least 1 row, not %s', coalesce(list_messages.max_rows::text, 'NULL')));
    END IF;
    IF list_messages.after IS NOT NULL THEN
        SELECT coalesce(
            (SELECT m.created_at FROM queen.message_log AS m WHERE m.lane_id = after_lane AND m.seq = after_seq),
            l.floor_created_at -- retention has removed it since
        ) INTO after_at
        FROM queen.lanes AS l WHERE l.id = after_lane AND l.queue_id = qid;
        IF NOT FOUND THEN
            PERFORM queen.raise_invalid(format('%s is no message of queue %L', list_messages.after, list_messages.queue_name));
        END IF;
    END IF;
    RETURN QUERY
    SELECT v.*
    FROM (
        SELECT m.lane_id, m.seq, m.created_at
        FROM queen.lanes AS l
        CROSS JOIN LATERAL (
            SELECT x.lane_id, x.seq, x.created_at
            FROM queen.message_log AS x
            WHERE
                x.lane_id = l.id
                AND (
                    after_at IS NULL
                    OR (
                        x.seq <= queen.seq_before(l.id, after_at + interval '1 microsecond')
                        AND (x.created_at, x.lane_id, x.seq) < (after_at, after_lane, after_seq)
                    )
                )
            ORDER BY x.seq DESC
            LIMIT list_messages.max_rows
        ) AS m
        WHERE l.queue_id = qid AND (list_messages.partition IS NULL OR l.name = list_messages.partition)
        ORDER BY m.created_at DESC, m.lane_id DESC, m.seq DESC
        LIMIT list_messages.max_rows
    ) AS page
    CROSS JOIN LATERAL (
        SELECT r.* FROM queen.messages AS r WHERE r.lane_id = page.lane_id AND r.seq = page.seq LIMIT 1
    ) AS v
    ORDER BY page.created_at DESC, page.lane_id DESC, page.seq DESC;
END
$$;

-- Every retained message of a pipeline, in time order, across queues.
CREATE OR REPLACE FUNCTION queen.trace(trace_id uuid)
RETURNS SETOF queen.messages
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
    SELECT v.* FROM queen.messages AS v
    WHERE v.trace_id = trace.trace_id
    ORDER BY v.created_at, v.lane_id, v.seq;
$$;
