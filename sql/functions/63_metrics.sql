-- Figures per queue, consumer group and time bucket: where to begin, how much there is, the figures themselves.

-- Where the next run of the metrics begins: for each queue one bucket before its newest that is stored, because that
-- one may have been computed before it was over, and the one before it before the last settlement in it was committed.
-- A run stores a bucket for every queue that it looked at, so an idle queue does not hold the others back. A queue that
-- no run has seen begins with its creation; nothing stored at all means everything.
CREATE OR REPLACE FUNCTION queen.metrics_from(bucket_length int, queue_filter text)
RETURNS TABLE (computed_from timestamptz)
LANGUAGE sql STABLE
AS $$
    SELECT CASE
        WHEN count(newest.bucket_start) > 0
            THEN min(coalesce(newest.bucket_start - make_interval(secs => bucket_length), q.created_at))
    END
    FROM queen.queues AS q
    LEFT JOIN LATERAL (
        SELECT m.bucket_start
        FROM queen.queue_metrics AS m
        WHERE m.queue_name = q.name AND m.consumer_group = '' AND m.bucket_seconds = bucket_length
        ORDER BY m.bucket_start DESC
        LIMIT 1
    ) AS newest ON TRUE
    WHERE queue_filter IS NULL OR q.name = queue_filter;
$$;

-- How many messages queen.compute_metrics would look at: those pushed, and those completed, in the time given.
CREATE OR REPLACE FUNCTION queen.metrics_size(
    computed_from timestamptz, computed_before timestamptz, queue_filter text
)
RETURNS TABLE (messages bigint)
LANGUAGE sql STABLE
AS $$
    SELECT
        (
            SELECT coalesce(sum(s.last_seq - s.first_seq + 1), 0)
            FROM queen.message_spans(queue_filter, NULL, computed_from, computed_before) AS s
        )::bigint
        + (
            SELECT coalesce(sum(d.completed), 0)
            FROM queen.deliveries AS d
            WHERE
                (computed_from IS NULL OR d.ended_at >= computed_from)
                AND (computed_before IS NULL OR d.ended_at < computed_before)
                AND (queue_filter IS NULL OR d.queue_name = queue_filter)
        );
$$;

-- The figures without Spark, for as many messages as are computed before Spark would have started. The definitions are
-- those of airflow_provider_queen.spark.metrics. Both ends of the time are starts of buckets; NULL means no end.
CREATE OR REPLACE FUNCTION queen.compute_metrics(
    bucket_length int, computed_from timestamptz, computed_before timestamptz, queue_filter text
)
RETURNS TABLE (
    queue_name text,
    consumer_group text,
    bucket_start timestamptz,
    pushed bigint,
    completed bigint,
    failed bigint,
    dead_lettered bigint,
    latency_p50_ms double precision,
    latency_p95_ms double precision,
    latency_p99_ms double precision,
    processing_p50_ms double precision,
    processing_p95_ms double precision,
    processing_p99_ms double precision,
    partitions bigint,
    skew double precision,
    payload_bytes bigint,
    largest_payload_bytes bigint,
    deliveries bigint,
    redeliveries bigint,
    rejected bigint,
    released bigint,
    expired bigint,
    busy_seconds double precision
)
LANGUAGE sql STABLE
AS $$
    WITH pushes AS (
        SELECT
            q.name AS queue_name,
            date_bin(make_interval(secs => bucket_length), m.created_at, 'epoch') AS bucket_start,
            count(*) AS messages,
            sum(octet_length(m.payload::text)) AS bytes,
            max(octet_length(m.payload::text)) AS largest
        FROM queen.message_spans(queue_filter, NULL, computed_from, computed_before) AS s
        INNER JOIN queen.lanes AS l ON l.id = s.lane_id
        INNER JOIN queen.queues AS q ON q.id = l.queue_id
        CROSS JOIN LATERAL (
            SELECT
                g.created_at,
                g.payload
            FROM queen.message_log AS g
            WHERE g.lane_id = s.lane_id AND g.seq BETWEEN s.first_seq AND s.last_seq
            ORDER BY g.seq
        ) AS m
        GROUP BY q.name, bucket_start, s.lane_id / 10
    ),

    pushed AS (
        SELECT
            p.queue_name,
            '' AS consumer_group,
            p.bucket_start,
            sum(p.messages)::bigint AS messages,
            count(*) AS partitions,
            max(p.messages) / avg(p.messages) AS skew,
            sum(p.bytes)::bigint AS bytes,
            max(p.largest)::bigint AS largest
        FROM pushes AS p
        GROUP BY p.queue_name, p.bucket_start
    ),

    ended AS MATERIALIZED (
        SELECT
            d.*,
            date_bin(make_interval(secs => bucket_length), d.ended_at, 'epoch') AS bucket_start,
            d.completed + d.failed + d.rejected AS settled,
            extract(EPOCH FROM d.ended_at - d.popped_at)::float8 * 1000 AS took_ms
        FROM queen.deliveries AS d
        WHERE
            (computed_from IS NULL OR d.ended_at >= computed_from)
            AND (computed_before IS NULL OR d.ended_at < computed_before)
            AND (queue_filter IS NULL OR d.queue_name = queue_filter)
    ),

    settled AS (
        SELECT
            e.queue_name,
            e.consumer_group,
            e.bucket_start,
            sum(e.completed) AS completed,
            sum(e.failed) AS failed,
            sum(e.rejected) AS rejected,
            sum(e.released) AS released,
            sum(e.expired) AS expired,
            count(*) AS deliveries,
            count(*) FILTER (WHERE e.attempt > 1) AS redeliveries,
            extract(EPOCH FROM sum(e.ended_at - e.popped_at))::float8 AS busy_seconds,
            -- A lease that only expired or was only given back processed nothing.
            percentile_cont(ARRAY[0.5, 0.95, 0.99]) WITHIN GROUP (ORDER BY e.took_ms)
            FILTER (WHERE e.settled > 0) AS processing_ms
        FROM ended AS e
        GROUP BY e.queue_name, e.consumer_group, e.bucket_start
    ),

    spread AS (
        SELECT
            p.queue_name,
            p.consumer_group,
            p.bucket_start,
            count(*) AS partitions,
            max(p.settled) / nullif(avg(p.settled), 0) AS skew
        FROM (
            SELECT
                e.queue_name,
                e.consumer_group,
                e.bucket_start,
                sum(e.settled) AS settled
            FROM ended AS e
            GROUP BY e.queue_name, e.consumer_group, e.bucket_start, e.lane_id / 10
        ) AS p
        GROUP BY p.queue_name, p.consumer_group, p.bucket_start
    ),

    -- A delivery says how many of its messages completed, not which: that many, at even distances.
    latencies AS (
        SELECT
            e.queue_name,
            e.consumer_group,
            e.bucket_start,
            percentile_cont(ARRAY[0.5, 0.95, 0.99])
            WITHIN GROUP (ORDER BY extract(EPOCH FROM e.ended_at - m.created_at)::float8 * 1000) AS latency_ms
        FROM ended AS e
        CROSS JOIN LATERAL (
            SELECT g.created_at
            FROM queen.message_log AS g
            WHERE
                g.lane_id = e.lane_id
                AND g.seq BETWEEN e.first_seq AND e.last_seq
                AND (g.seq - e.first_seq + 1) * e.completed / (e.last_seq - e.first_seq + 1)
                > (g.seq - e.first_seq) * e.completed / (e.last_seq - e.first_seq + 1)
            ORDER BY g.seq
        ) AS m
        WHERE e.completed > 0
        GROUP BY e.queue_name, e.consumer_group, e.bucket_start
    ),

    buried AS (
        SELECT
            q.name AS queue_name,
            d.consumer_group,
            date_bin(make_interval(secs => bucket_length), d.failed_at, 'epoch') AS bucket_start,
            count(*) AS messages
        FROM queen.dead_letter_queue AS d
        INNER JOIN queen.queues AS q ON q.id = d.queue_id
        WHERE
            d.id > (SELECT queen.dead_letter_before(computed_from))
            AND (computed_from IS NULL OR d.failed_at >= computed_from)
            AND (computed_before IS NULL OR d.failed_at < computed_before)
            AND (queue_filter IS NULL OR q.name = queue_filter)
        GROUP BY q.name, d.consumer_group, bucket_start
    )

    SELECT
        queue_name,
        consumer_group,
        bucket_start,
        coalesce(p.messages, 0),
        coalesce(s.completed, 0),
        coalesce(s.failed, 0),
        coalesce(b.messages, 0),
        l.latency_ms[1],
        l.latency_ms[2],
        l.latency_ms[3],
        s.processing_ms[1],
        s.processing_ms[2],
        s.processing_ms[3],
        coalesce(p.partitions, o.partitions, 0),
        coalesce(p.skew, o.skew)::float8,
        coalesce(p.bytes, 0),
        coalesce(p.largest, 0),
        coalesce(s.deliveries, 0),
        coalesce(s.redeliveries, 0),
        coalesce(s.rejected, 0),
        coalesce(s.released, 0),
        coalesce(s.expired, 0),
        coalesce(s.busy_seconds, 0)
    FROM pushed AS p
    FULL JOIN settled AS s USING (queue_name, consumer_group, bucket_start)
    FULL JOIN buried AS b USING (queue_name, consumer_group, bucket_start)
    LEFT JOIN spread AS o USING (queue_name, consumer_group, bucket_start)
    LEFT JOIN latencies AS l USING (queue_name, consumer_group, bucket_start);
$$;

-- How much waits at this moment, a row per queue and group, and how fast that has grown since the last run that
-- measured it. The row with an empty group is about the queue: what its slowest group has not settled, or, without any
-- group, all it retains.
CREATE OR REPLACE FUNCTION queen.current_lags(bucket_length int, queue_filter text)
RETURNS TABLE (
    queue_name text,
    consumer_group text,
    bucket_start timestamptz,
    pending bigint,
    pending_at timestamptz,
    pending_slope double precision,
    oldest_age_seconds double precision
)
LANGUAGE sql VOLATILE
AS $$
    SELECT
        q.name,
        g.consumer_group,
        date_bin(make_interval(secs => bucket_length), measured.at, 'epoch'),
        g.pending,
        measured.at,
        (g.pending - earlier.pending) / nullif(extract(EPOCH FROM measured.at - earlier.pending_at)::float8, 0),
        g.oldest_age_seconds
    FROM (SELECT clock_timestamp() AS at) AS measured
    CROSS JOIN queen.queues AS q
    CROSS JOIN LATERAL (
        SELECT
            '' AS consumer_group,
            queen.largest_backlog(q.id) AS pending,
            NULL::double precision AS oldest_age_seconds
        UNION ALL
        SELECT
            r.name,
            d.pending,
            d.oldest_age_seconds
        FROM queen.groups_of(q) AS r (name)
        CROSS JOIN LATERAL queen.depth(q.name, r.name) AS d
    ) AS g
    LEFT JOIN LATERAL (
        SELECT
            m.pending,
            m.pending_at
        FROM queen.queue_metrics AS m
        WHERE
            m.queue_name = q.name
            AND m.consumer_group = g.consumer_group
            AND m.bucket_seconds = bucket_length
            AND m.pending IS NOT NULL
        ORDER BY m.bucket_start DESC
        LIMIT 1
    ) AS earlier ON TRUE
    WHERE queue_filter IS NULL OR q.name = queue_filter
    ORDER BY q.name, g.consumer_group;
$$;

-- Stores computed buckets, a JSON array of rows of queen.queue_metrics; doing it again changes nothing. The counts of a
-- bucket only ever grow, so a run that saw less than an earlier one (retention has removed messages since) leaves the
-- earlier row as it is. Rows go in by key order: two runs at once wait for each other instead of deadlocking.
CREATE OR REPLACE FUNCTION queen.record_metrics(metrics json)
RETURNS TABLE (written bigint)
LANGUAGE sql VOLATILE
AS $$
    WITH stored AS (
        INSERT INTO queen.queue_metrics AS m (
            queue_name,
            consumer_group,
            bucket_start,
            bucket_seconds,
            pushed,
            completed,
            failed,
            dead_lettered,
            latency_p50_ms,
            latency_p95_ms,
            latency_p99_ms,
            processing_p50_ms,
            processing_p95_ms,
            processing_p99_ms,
            partitions,
            skew,
            payload_bytes,
            largest_payload_bytes,
            deliveries,
            redeliveries,
            rejected,
            released,
            expired,
            busy_seconds,
            pending,
            pending_at,
            pending_slope,
            oldest_age_seconds,
            computed_at
        )
        SELECT
            r.queue_name,
            r.consumer_group,
            r.bucket_start,
            r.bucket_seconds,
            r.pushed,
            r.completed,
            r.failed,
            r.dead_lettered,
            r.latency_p50_ms,
            r.latency_p95_ms,
            r.latency_p99_ms,
            r.processing_p50_ms,
            r.processing_p95_ms,
            r.processing_p99_ms,
            r.partitions,
            r.skew,
            r.payload_bytes,
            r.largest_payload_bytes,
            r.deliveries,
            r.redeliveries,
            r.rejected,
            r.released,
            r.expired,
            r.busy_seconds,
            r.pending,
            r.pending_at,
            r.pending_slope,
            r.oldest_age_seconds,
            clock_timestamp()
        FROM json_populate_recordset(NULL::queen.queue_metrics, metrics) AS r
        ORDER BY r.queue_name, r.consumer_group, r.bucket_start
        ON CONFLICT (queue_name, consumer_group, bucket_start, bucket_seconds) DO UPDATE
            SET
                pushed = excluded.pushed,
                completed = excluded.completed,
                failed = excluded.failed,
                dead_lettered = greatest(m.dead_lettered, excluded.dead_lettered), -- purged ones count, too
                latency_p50_ms = coalesce(excluded.latency_p50_ms, m.latency_p50_ms),
                latency_p95_ms = coalesce(excluded.latency_p95_ms, m.latency_p95_ms),
                latency_p99_ms = coalesce(excluded.latency_p99_ms, m.latency_p99_ms),
                processing_p50_ms = coalesce(excluded.processing_p50_ms, m.processing_p50_ms),
                processing_p95_ms = coalesce(excluded.processing_p95_ms, m.processing_p95_ms),
                processing_p99_ms = coalesce(excluded.processing_p99_ms, m.processing_p99_ms),
                partitions = excluded.partitions,
                skew = coalesce(excluded.skew, m.skew),
                payload_bytes = excluded.payload_bytes,
                largest_payload_bytes = excluded.largest_payload_bytes,
                deliveries = excluded.deliveries,
                redeliveries = excluded.redeliveries,
                rejected = excluded.rejected,
                released = excluded.released,
                expired = excluded.expired,
                busy_seconds = excluded.busy_seconds,
                pending = coalesce(excluded.pending, m.pending),
                pending_at = coalesce(excluded.pending_at, m.pending_at),
                pending_slope = CASE
                    WHEN excluded.pending IS NULL THEN m.pending_slope ELSE excluded.pending_slope
                END,
                oldest_age_seconds = CASE
                    WHEN excluded.pending IS NULL THEN m.oldest_age_seconds ELSE excluded.oldest_age_seconds
                END,
                computed_at = excluded.computed_at
            WHERE
                excluded.pushed >= m.pushed
                AND excluded.completed >= m.completed
                AND excluded.failed >= m.failed
                AND excluded.deliveries >= m.deliveries
        RETURNING 1
    )

    SELECT count(*) FROM stored;
$$;

-- Messages that the next failure makes dead letters, per queue, partition and group.
CREATE OR REPLACE FUNCTION queen.near_dead_letters(queue_filter text)
RETURNS TABLE (queue_name text, partition_name text, consumer_group text, messages bigint, failures int)
LANGUAGE sql STABLE
AS $$
    SELECT
        q.name,
        l.name,
        c.consumer_group,
        count(*),
        max(r.failures)
    FROM queen.redeliveries AS r
    INNER JOIN queen.consumers AS c ON c.id = r.consumer_id
    INNER JOIN queen.lanes AS l ON l.id = c.lane_id
    INNER JOIN queen.queues AS q ON q.id = c.queue_id
    WHERE
        q.retry_limit > 0
        AND r.failures >= q.retry_limit
        AND (queue_filter IS NULL OR q.name = queue_filter)
    GROUP BY q.name, l.name, c.consumer_group
    ORDER BY q.name, l.name, c.consumer_group;
$$;

-- When the oldest of some messages was pushed: how far back a scan must go that is to meet them all.
CREATE OR REPLACE FUNCTION queen.oldest_created(lane_ids bigint[], seqs bigint[])
RETURNS TABLE (created_at timestamptz)
LANGUAGE sql STABLE
AS $$
    SELECT min(m.created_at)
    FROM unnest(lane_ids, seqs) AS r (lane_id, seq)
    CROSS JOIN LATERAL (
        SELECT g.created_at
        FROM queen.message_log AS g
        WHERE g.lane_id = r.lane_id AND g.seq >= r.seq
        ORDER BY g.seq
        LIMIT 1
    ) AS m;
$$;

-- Stores anomalies, but none that was stored for the same queue, partition and group within the last quiet_seconds: a
-- job that runs every ten minutes would otherwise repeat itself until somebody acts.
CREATE OR REPLACE FUNCTION queen.record_anomalies(
    quiet_seconds int,
    queue_names text[],
    partition_names text[],
    consumer_groups text[],
    kinds text[],
    severities text[],
    reasons text[],
    figures float8[]
)
RETURNS TABLE (written bigint)
LANGUAGE sql VOLATILE
AS $$
    WITH stored AS (
        INSERT INTO queen.anomalies (
            queue_name, partition_name, consumer_group, kind, severity, reason, value
        )
        SELECT
            r.queue_name,
            r.partition_name,
            r.consumer_group,
            r.kind,
            r.severity,
            r.reason,
            r.figure
        FROM unnest(
            queue_names, partition_names, consumer_groups, kinds, severities, reasons, figures
        ) AS r (queue_name, partition_name, consumer_group, kind, severity, reason, figure)
        WHERE
            NOT EXISTS (
                SELECT 1
                FROM queen.anomalies AS a
                WHERE
                    a.detected_at > now() - make_interval(secs => quiet_seconds)
                    AND a.queue_name = r.queue_name
                    AND a.kind = r.kind
                    AND a.partition_name IS NOT DISTINCT FROM r.partition_name
                    AND a.consumer_group IS NOT DISTINCT FROM r.consumer_group
            )
        RETURNING 1
    )

    SELECT count(*) FROM stored;
$$;
