-- Where the next run of the metrics begins: one bucket before the newest that is stored, because that one may have been
-- computed before it was over, and the one before it before the last settlement in it was committed.
CREATE OR REPLACE FUNCTION queen.metrics_from(bucket_length int, queue_filter text)
RETURNS TABLE (computed_from timestamptz)
LANGUAGE sql STABLE
AS $$
    SELECT max(m.bucket_start) - make_interval(secs => bucket_length)
    FROM queen.queue_metrics AS m
    WHERE m.bucket_seconds = bucket_length AND (queue_filter IS NULL OR m.queue_name = queue_filter);
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
