-- Before the upgrade from v2 commits: the queue's own depth beside what v2 said was pending, queue by queue and group
-- by group, with the count and checksum of messages. A difference ends the migration, and v2 is as it was.
CREATE TABLE queen_v2.verification (
    queue_name text NOT NULL,
    consumer_group text,
    messages bigint NOT NULL,
    checksum numeric NOT NULL,
    pending_in_v2 bigint,
    pending bigint,
    verified_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
INSERT INTO queen_v2.verification (queue_name, consumer_group, messages, checksum, pending_in_v2, pending)
SELECT
    q.name, g.consumer_group, m.messages, m.checksum, e.pending,
    (
        SELECT d.pending
        FROM queen.queue_groups AS known
        CROSS JOIN LATERAL queen.depth(q.name, known.consumer_group) AS d
        WHERE known.queue_id = q.id AND known.consumer_group = g.consumer_group
    )
FROM queen.queues AS q
CROSS JOIN
    LATERAL (
        SELECT coalesce(sum(p.copied), 0)::bigint AS messages, coalesce(sum(p.checksum), 0) AS checksum
        FROM queen.partitions AS r INNER JOIN queen_v2.partition_map AS p ON p.id = r.id
        WHERE r.queue_id = q.id
    ) AS m
LEFT JOIN (
    SELECT k.queue_id, k.consumer_group FROM queen.queue_groups AS k
    UNION
    SELECT l.queue_id, x.consumer_group
    FROM queen_v2.expected_pending AS x INNER JOIN queen.lanes AS l ON l.id = x.lane_id
) AS g ON g.queue_id = q.id
LEFT JOIN LATERAL (
    -- What producers wrote after v2 was asked is pending for every group that subscribed to that time.
    SELECT
        sum(x.pending + (
            SELECT count(*) FROM queen.message_log AS n
            WHERE n.lane_id = x.lane_id AND n.seq > x.through_seq AND n.created_at >= s.subscription_timestamp
        ))::bigint AS pending
    FROM queen_v2.expected_pending AS x
    INNER JOIN queen.lanes AS l ON l.id = x.lane_id
    INNER JOIN queen.consumer_groups_metadata AS s ON s.queue_name = q.name AND s.consumer_group = x.consumer_group
    WHERE l.queue_id = q.id AND x.consumer_group = g.consumer_group
) AS e ON TRUE;
DO $$
DECLARE
    wrong queen_v2.verification;
BEGIN
    SELECT v.* INTO wrong FROM queen_v2.verification AS v
    WHERE v.consumer_group IS NOT NULL AND v.pending IS DISTINCT FROM coalesce(v.pending_in_v2, 0)
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'queue %, group %: % pending, by v2 %; v2 is as it was',
            wrong.queue_name, wrong.consumer_group, wrong.pending, wrong.pending_in_v2;
    END IF;
END
$$;
DROP TABLE queen_v2.expected_pending;
