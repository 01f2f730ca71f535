-- What the Spark data source and the Spark applications call.
--
-- A scan takes no snapshot of its own and holds none: message rows are immutable and dense in seq, and seq order is
-- commit order. Bounds that were fixed once therefore name the same rows for every later reader, in any transaction.
-- The scan functions carry no SET clause, so that the planner inlines them and reads only the selected columns.

-- Tells a mistyped queue from an empty one.
CREATE OR REPLACE FUNCTION queen.queue_exists(queue_filter text)
RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT EXISTS (SELECT 1 FROM queen.queues AS q WHERE q.name = queue_filter);
$$;

-- The first and the last seq of every lane with messages. Both ends are looked up, nothing is counted.
-- created_at never falls as seq rises, so bounds in time are bounds in seq; NULL means no bound.
CREATE OR REPLACE FUNCTION queen.message_spans(
    queue_filter text, partition_filter text, created_from timestamptz, created_before timestamptz
)
RETURNS TABLE (lane_id bigint, first_seq bigint, last_seq bigint)
LANGUAGE sql STABLE
AS $$
    SELECT
        l.id,
        span.first_seq,
        span.last_seq
    FROM queen.lanes AS l
    INNER JOIN queen.queues AS q ON q.id = l.queue_id
    CROSS JOIN LATERAL (
        SELECT m.seq
        FROM queen.message_log AS m
        WHERE m.lane_id = l.id
        ORDER BY m.seq DESC
        LIMIT 1
    ) AS newest
    CROSS JOIN LATERAL (
        SELECT
            CASE
                WHEN created_from IS NULL THEN l.floor_seq
                ELSE queen.seq_before(l.id, created_from)
            END + 1 AS first_seq,
            CASE
                WHEN created_before IS NULL THEN newest.seq
                ELSE queen.seq_before(l.id, created_before)
            END AS last_seq
    ) AS span
    WHERE
        (queue_filter IS NULL OR q.name = queue_filter)
        AND (partition_filter IS NULL OR l.name = partition_filter)
        AND span.last_seq >= span.first_seq;
$$;

-- Even ranges of the retained messages, packed into at most `slices` slices of equal size.
CREATE OR REPLACE FUNCTION queen.message_ranges(
    queue_filter text,
    partition_filter text,
    created_from timestamptz,
    created_before timestamptz,
    slices int
)
RETURNS TABLE (slice int, lane_id bigint, first_seq bigint, last_seq bigint)
LANGUAGE sql STABLE
AS $$
    WITH spans AS (
        SELECT
            s.lane_id,
            s.first_seq,
            s.last_seq - s.first_seq + 1 AS messages
        FROM queen.message_spans(queue_filter, partition_filter, created_from, created_before) AS s
    ),

    laid_out AS (
        SELECT
            s.lane_id,
            s.first_seq,
            s.messages,
            (sum(s.messages) OVER (ORDER BY s.lane_id) - s.messages)::bigint AS messages_before,
            ceil(sum(s.messages) OVER () / slices)::bigint AS slice_size
        FROM spans AS s
    )

    SELECT
        n.slice::int,
        l.lane_id,
        l.first_seq + greatest(n.slice * l.slice_size - l.messages_before, 0),
        l.first_seq + least((n.slice + 1) * l.slice_size - l.messages_before, l.messages) - 1
    FROM laid_out AS l
    CROSS JOIN LATERAL generate_series(
        l.messages_before / l.slice_size,
        (l.messages_before + l.messages - 1) / l.slice_size
    ) AS n (slice)
    ORDER BY n.slice, l.lane_id;
$$;

-- The messages of some ranges, each range in seq order.
-- ORDER BY inside LATERAL keeps the planner from joining the whole log: it can only look up one range after another.
CREATE OR REPLACE FUNCTION queen.scan_messages(lane_ids bigint[], first_seqs bigint[], last_seqs bigint[])
RETURNS TABLE (
    id text,
    lane_id bigint,
    seq bigint,
    queue_name text,
    partition_name text,
    priority smallint,
    transaction_id text,
    trace_id text,
    payload text,
    is_encrypted boolean,
    origin_transaction_id text,
    requeued_from text,
    created_at timestamptz,
    payload_bytes int
)
LANGUAGE sql STABLE
AS $$
    SELECT
        m.id::text,
        m.lane_id,
        m.seq,
        m.queue_name,
        m.partition_name,
        m.priority,
        m.transaction_id,
        m.trace_id::text,
        m.payload::text,
        m.is_encrypted,
        m.origin_transaction_id,
        m.requeued_from::text,
        m.created_at,
        octet_length(m.payload::text)
    FROM unnest(lane_ids, first_seqs, last_seqs) AS r (lane_id, first_seq, last_seq)
    CROSS JOIN LATERAL (
        SELECT v.*
        FROM queen.messages AS v
        WHERE
            v.lane_id = r.lane_id
            AND v.seq BETWEEN r.first_seq AND r.last_seq
        ORDER BY v.seq
    ) AS m;
$$;

-- Even ranges between two ids. Ids may have gaps, so slices are even in ids, nearly even in rows.
CREATE OR REPLACE FUNCTION queen.id_ranges(lowest bigint, highest bigint, slices int)
RETURNS TABLE (first_id bigint, last_id bigint)
LANGUAGE sql IMMUTABLE
AS $$
    SELECT
        lowest + n.slice * size.ids,
        least(lowest + (n.slice + 1) * size.ids - 1, highest)
    FROM (SELECT (highest - lowest) / slices + 1 AS ids) AS size
    CROSS JOIN generate_series(0, slices - 1) AS n (slice)
    WHERE lowest + n.slice * size.ids <= highest
    ORDER BY n.slice;
$$;

-- The subquery with OFFSET is read by the index on ended_at. Without it the planner may look for the lowest id by
-- walking over all ids from the first on, which are those of the oldest deliveries.
CREATE OR REPLACE FUNCTION queen.delivery_ranges(ended_from timestamptz, ended_before timestamptz, slices int)
RETURNS TABLE (first_id bigint, last_id bigint)
LANGUAGE sql STABLE
AS $$
    SELECT r.*
    FROM (
        SELECT
            min(e.id) AS lowest,
            max(e.id) AS highest
        FROM (
            SELECT d.id
            FROM queen.deliveries AS d
            WHERE
                (ended_from IS NULL OR d.ended_at >= ended_from)
                AND (ended_before IS NULL OR d.ended_at < ended_before)
            OFFSET 0
        ) AS e
    ) AS bounds
    CROSS JOIN LATERAL queen.id_ranges(bounds.lowest, bounds.highest, slices) AS r;
$$;

-- An id below which every dead letter is older than a moment. Ids are given in the order of failed_at, but for what
-- ran at the same time: a minute is more than enough for that. Walks back over what is newer, and no further.
CREATE OR REPLACE FUNCTION queen.dead_letter_before(moment timestamptz)
RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    dead record;
BEGIN
    IF moment IS NULL THEN
        RETURN 0;
    END IF;
    FOR dead IN SELECT d.id, d.failed_at FROM queen.dead_letter_queue AS d ORDER BY d.id DESC LOOP
        IF dead.failed_at < moment - interval '1 minute' THEN
            RETURN dead.id;
        END IF;
    END LOOP;
    RETURN 0;
END
$$;

CREATE OR REPLACE FUNCTION queen.dead_letter_ranges(failed_from timestamptz, slices int)
RETURNS TABLE (first_id bigint, last_id bigint)
LANGUAGE sql STABLE
AS $$
    SELECT r.*
    FROM (
        SELECT
            min(d.id) AS lowest,
            max(d.id) AS highest
        FROM queen.dead_letter_queue AS d
        WHERE d.id > (SELECT queen.dead_letter_before(failed_from))
    ) AS bounds
    CROSS JOIN LATERAL queen.id_ranges(bounds.lowest, bounds.highest, slices) AS r;
$$;

-- The deliveries of one range of ids.
CREATE OR REPLACE FUNCTION queen.scan_deliveries(
    queue_filter text, partition_filter text, group_filter text, range_first_id bigint, range_last_id bigint
)
RETURNS TABLE (
    id bigint,
    queue_name text,
    partition_name text,
    priority smallint,
    consumer_group text,
    lane_id bigint,
    first_seq bigint,
    last_seq bigint,
    completed int,
    failed int,
    rejected int,
    released int,
    expired int,
    attempt int,
    popped_at timestamptz,
    ended_at timestamptz
)
LANGUAGE sql STABLE
AS $$
    SELECT
        d.id,
        d.queue_name,
        d.partition_name,
        d.priority,
        d.consumer_group,
        d.lane_id,
        d.first_seq,
        d.last_seq,
        d.completed,
        d.failed,
        d.rejected,
        d.released,
        d.expired,
        d.attempt,
        d.popped_at,
        d.ended_at
    FROM queen.deliveries AS d
    WHERE
        d.id BETWEEN range_first_id AND range_last_id
        AND (queue_filter IS NULL OR d.queue_name = queue_filter)
        AND (partition_filter IS NULL OR d.partition_name = partition_filter)
        AND (group_filter IS NULL OR d.consumer_group = group_filter)
    ORDER BY d.id;
$$;

-- The dead letters of one range of ids.
CREATE OR REPLACE FUNCTION queen.scan_dead_letters(
    queue_filter text, partition_filter text, group_filter text, range_first_id bigint, range_last_id bigint
)
RETURNS TABLE (
    id bigint,
    queue_name text,
    partition_name text,
    priority smallint,
    consumer_group text,
    lane_id bigint,
    seq bigint,
    message_id text,
    transaction_id text,
    trace_id text,
    payload text,
    is_encrypted boolean,
    origin_transaction_id text,
    reason text,
    error_message text,
    retry_count int,
    original_created_at timestamptz,
    failed_at timestamptz,
    requeued_at timestamptz
)
LANGUAGE sql STABLE
AS $$
    SELECT
        d.id,
        q.name,
        d.partition_name,
        d.priority,
        d.consumer_group,
        d.lane_id,
        d.seq,
        d.message_id::text,
        d.transaction_id,
        d.trace_id::text,
        d.payload::text,
        d.is_encrypted,
        d.origin_transaction_id,
        d.reason,
        d.error_message,
        d.retry_count,
        d.original_created_at,
        d.failed_at,
        d.requeued_at
    FROM queen.dead_letter_queue AS d
    INNER JOIN queen.queues AS q ON q.id = d.queue_id
    WHERE
        d.id BETWEEN range_first_id AND range_last_id
        AND (queue_filter IS NULL OR q.name = queue_filter)
        AND (partition_filter IS NULL OR d.partition_name = partition_filter)
        AND (group_filter IS NULL OR d.consumer_group = group_filter)
    ORDER BY d.id;
$$;

-- Where every group stands in every partition it has met.
CREATE OR REPLACE FUNCTION queen.scan_consumers(queue_filter text, partition_filter text, group_filter text)
RETURNS TABLE (
    queue_name text,
    partition_name text,
    priority smallint,
    consumer_group text,
    lane_id bigint,
    cursor bigint,
    last_seq bigint,
    pending bigint,
    in_flight bigint,
    lease_expires_at timestamptz,
    popped_at timestamptz,
    settled_at timestamptz,
    total_completed bigint,
    total_dropped bigint,
    retry_limit int
)
LANGUAGE sql STABLE
AS $$
    SELECT
        c.queue_name,
        c.partition_name,
        c.priority,
        c.consumer_group,
        c.lane_id,
        c.cursor,
        c.last_seq,
        c.pending,
        queen.size(c.held),
        c.lease_expires_at,
        c.popped_at,
        c.settled_at,
        c.total_completed,
        c.total_dropped,
        q.retry_limit
    FROM queen.partition_consumers AS c
    INNER JOIN queen.queues AS q ON q.name = c.queue_name
    WHERE
        (queue_filter IS NULL OR c.queue_name = queue_filter)
        AND (partition_filter IS NULL OR c.partition_name = partition_filter)
        AND (group_filter IS NULL OR c.consumer_group = group_filter)
    ORDER BY c.queue_name, c.partition_name, c.priority, c.consumer_group;
$$;
