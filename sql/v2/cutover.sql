-- Upgrade from v2, last part, in the migration's transaction: consumers stop, what they did is copied; producers stop,
-- what they wrote since is copied; v2's tables go to the schema queen_v2, the present ones come to queen.
-- Producers wait from the second LOCK until the commit: for what came since the last copy, the count of messages, the
-- creation of functions and the comparison of depths; a second with 200,000 messages.
SET LOCAL lock_timeout = '3s';
LOCK TABLE
queen.messages_status, queen.partition_cursors, queen.partition_leases, queen.consumer_groups, queen.dead_letter_queue,
queen.retention_history IN ACCESS EXCLUSIVE MODE;
-- Temporary sorts and hashes of a migration may take more than a query's share.
SET LOCAL work_mem = '256MB';
SET LOCAL jit = OFF;
ANALYZE queen_v2.message_map, queen_v2.partition_map, queen_next.lanes, queen_next.message_log;

CREATE FUNCTION queen_v2.copy_rest()
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    partition_id uuid;
BEGIN
    PERFORM queen_v2.copy_partitions();
    PERFORM queen_v2.take_changes();
    FOR partition_id IN SELECT p.v2_id FROM queen_v2.partition_map AS p ORDER BY p.id LOOP
        WHILE queen_v2.copy_chunk(partition_id, 10000) = 10000 LOOP
            NULL;
        END LOOP;
    END LOOP;
END
$$;
SELECT queen_v2.copy_rest();
SELECT queen_v2.copy_consumers(FALSE);
INSERT INTO queen_next.queue_groups (queue_id, consumer_group, created_at, is_subscribed, priorities)
SELECT g.queue_id, g.consumer_group, g.created_at, TRUE, '{0}' FROM queen_v2.groups AS g;
INSERT INTO queen_next.consumer_groups_metadata (
    consumer_group, queue_name, subscription_mode, subscription_timestamp, created_at
)
SELECT
    g.consumer_group, q.name,
    CASE WHEN g.subscription_start_from IS NULL THEN 'all' ELSE 'timestamp' END,
    coalesce(g.subscription_start_from, '-infinity'), g.created_at
FROM queen_v2.groups AS g
INNER JOIN queen_next.queues AS q ON q.id = g.queue_id;

INSERT INTO queen_next.retention_history (
    queue_name, partition_name, lane_id, retention_type, messages_deleted, first_seq, last_seq, executed_at
)
SELECT
    q.name, l.name, l.id,
    CASE
        WHEN h.retention_type LIKE 'completed%' THEN 'completed'
        WHEN h.retention_type LIKE '%evict%' THEN 'evicted'
        ELSE 'retention'
    END,
    coalesce(h.messages_deleted, 0), 0, 0, -- v2 did not keep which
    coalesce(h.executed_at, now())
FROM queen.retention_history AS h
INNER JOIN queen_v2.partition_map AS p ON p.v2_id = h.partition_id
INNER JOIN queen_next.lanes AS l ON l.id = p.id * 10
INNER JOIN queen_next.queues AS q ON q.id = l.queue_id
ORDER BY h.executed_at, h.id;

LOCK TABLE queen.messages, queen.partitions, queen.queues IN ACCESS EXCLUSIVE MODE;
SELECT queen_v2.copy_rest();
SELECT queen_v2.copy_consumers(TRUE) WHERE EXISTS (SELECT 1 FROM queen_v2.partition_map AS p WHERE p.is_rewound);

-- Of queues and partitions what was deleted since goes, what was changed since is as it is now.
DELETE FROM queen_v2.partition_map AS m
WHERE NOT EXISTS (SELECT 1 FROM queen.partitions AS p WHERE p.id = m.v2_id);
DELETE FROM queen_next.lanes AS l WHERE NOT EXISTS (SELECT 1 FROM queen_v2.partition_map AS m WHERE m.id = l.id / 10);
DELETE FROM queen_next.partitions AS p WHERE NOT EXISTS (SELECT 1 FROM queen_v2.partition_map AS m WHERE m.id = p.id);
DELETE FROM queen_v2.queue_map AS m WHERE NOT EXISTS (SELECT 1 FROM queen.queues AS q WHERE q.id = m.v2_id);
DELETE FROM queen_next.queues AS q WHERE NOT EXISTS (SELECT 1 FROM queen_v2.queue_map AS m WHERE m.id = q.id);
-- max_size and ttl were stored by v2 and never enforced: they stay behind.
UPDATE queen_next.queues AS n
SET
    name = q.name,
    namespace = nullif(q.namespace, ''),
    task = nullif(q.task, ''),
    priority = coalesce(q.priority, 0),
    lease_time = CASE WHEN q.lease_time > 0 THEN q.lease_time ELSE 300 END,
    retry_limit = greatest(o.retry_limit, 0),
    retry_delay = greatest(coalesce(q.retry_delay, 1000), 0),
    dlq_after_max_retries = o.keeps_dead_letters,
    delayed_processing = greatest(coalesce(q.delayed_processing, 0), 0),
    window_buffer = greatest(coalesce(q.window_buffer, 0), 0),
    max_wait_time_seconds = greatest(coalesce(q.max_wait_time_seconds, 0), 0),
    max_queue_size = greatest(coalesce(q.max_queue_size, 0), 0),
    retention_enabled = coalesce(q.retention_enabled, FALSE),
    retention_seconds = greatest(coalesce(q.retention_seconds, 0), 0),
    completed_retention_seconds = greatest(coalesce(q.completed_retention_seconds, 0), 0),
    encryption_enabled = coalesce(q.encryption_enabled, FALSE)
FROM queen_v2.options AS o
INNER JOIN queen.queues AS q ON q.id = o.v2_id
WHERE n.id = o.id;

-- A message for each message, and each compared with its original.
DO $$
DECLARE
    wrong record;
BEGIN
    SELECT p.v2_id, p.copied, p.verified, count(m.id) AS messages INTO wrong
    FROM queen_v2.partition_map AS p
    LEFT JOIN queen.messages AS m ON m.partition_id = p.v2_id
    GROUP BY p.v2_id, p.copied, p.verified
    HAVING count(m.id) <> p.copied OR p.verified <> p.copied
    LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'partition % has % messages, of which % were copied and % compared; v2 is as it was',
            wrong.v2_id, wrong.messages, wrong.copied, wrong.verified;
    END IF;
END
$$;

DROP TRIGGER queen_v2_inserted ON queen.messages;
DROP TRIGGER queen_v2_deleted ON queen.messages;
DROP TRIGGER queen_v2_updated ON queen.messages;
DROP FUNCTION queen_v2.copy_rest;
DROP FUNCTION queen_v2.copy_consumers;
DROP FUNCTION queen_v2.seq_at;
DROP FUNCTION queen_v2.first_of;
DROP VIEW queen_v2.groups, queen_v2.met, queen_v2.subscriptions, queen_v2.all_dead_letters, queen_v2.live_leases;
DROP VIEW queen_v2.cursors, queen_v2.all_statuses, queen_v2.options;
DROP TABLE queen_v2.statuses, queen_v2.dead_letters;
DROP PROCEDURE queen_v2.copy;
DROP FUNCTION queen_v2.copy_chunk;
DROP FUNCTION queen_v2.take_changes;
DROP FUNCTION queen_v2.rewind;
DROP FUNCTION queen_v2.copy_partitions;
DROP FUNCTION queen_v2.note_changes;
DROP TABLE queen_v2.changes;

-- Kept, and kept as they are: who still holds an old plan must not write where nobody reads any more.
CREATE FUNCTION queen_v2.refuse()
RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION 'this table of Queen v2 was migrated: its messages are in the schema queen now, nothing was written';
END
$$;
DO $$
DECLARE
    moving regclass;
    routine regprocedure;
BEGIN
    FOREACH moving IN ARRAY ARRAY[
        'queen.messages_status', 'queen.partition_cursors', 'queen.partition_leases', 'queen.consumer_groups',
        'queen.dead_letter_queue', 'queen.retention_history', 'queen.messages', 'queen.partitions', 'queen.queues'
    ]::regclass[] LOOP
        EXECUTE format(
            'CREATE TRIGGER queen_v2_refuse BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON %s'
            ' FOR EACH STATEMENT EXECUTE FUNCTION queen_v2.refuse()', moving
        );
        FOR routine IN
            SELECT DISTINCT f.oid::regprocedure
            FROM pg_trigger AS t
            INNER JOIN pg_proc AS f ON f.oid = t.tgfoid
            WHERE t.tgrelid = moving AND f.pronamespace = 'queen'::regnamespace
        LOOP
            EXECUTE format('ALTER ROUTINE %s SET SCHEMA queen_v2', routine);
        END LOOP;
        EXECUTE format('ALTER TABLE %s SET SCHEMA queen_v2', moving);
    END LOOP;
END
$$;
SELECT queen_v2.move_tables('queen_next', 'queen');
DROP SCHEMA queen_next;
