-- Queues and their options.

-- Creates a queue, or merges options into an existing one: what is not named stays.
-- Setting a first max_queue_size waits for pushes under way: they did not look at a limit.
CREATE OR REPLACE FUNCTION queen.configure_queue(queue_name text, options jsonb DEFAULT '{}')
RETURNS queen.queues
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    known CONSTANT text[] := ARRAY[
        'namespace', 'task', 'priority', 'lease_time', 'retry_limit', 'retry_delay', 'dlq_after_max_retries',
        'delayed_processing', 'window_buffer', 'max_wait_time_seconds', 'max_queue_size', 'max_message_bytes',
        'retention_enabled', 'retention_seconds', 'completed_retention_seconds', 'encryption_enabled'
    ];
    unknown text;
    before queen.queues;
    wanted queen.queues;
    detail text;
BEGIN
    PERFORM queen.check_name('queue name', coalesce(configure_queue.queue_name, ''));
    IF jsonb_typeof(options) IS DISTINCT FROM 'object' THEN
        PERFORM queen.raise_invalid(format('options are a JSON object, not %s', coalesce(left(options::text, 40), 'NULL')));
    END IF;
    SELECT k INTO unknown FROM jsonb_object_keys(options) AS k WHERE k <> ALL (known) LIMIT 1;
    IF FOUND THEN
        PERFORM queen.raise_invalid(
            format('unknown queue option %L; the nearest is %L', unknown, queen.nearest(unknown, known))
        );
    END IF;

    INSERT INTO queen.queues (name) VALUES (configure_queue.queue_name) ON CONFLICT (name) DO NOTHING;
    SELECT q.* INTO before FROM queen.queues AS q WHERE q.name = configure_queue.queue_name FOR NO KEY UPDATE;
    BEGIN
        wanted := jsonb_populate_record(before, options);
        UPDATE queen.queues AS q
        SET
            namespace = wanted.namespace,
            task = wanted.task,
            priority = wanted.priority,
            lease_time = wanted.lease_time,
            retry_limit = wanted.retry_limit,
            retry_delay = wanted.retry_delay,
            dlq_after_max_retries = wanted.dlq_after_max_retries,
            delayed_processing = wanted.delayed_processing,
            window_buffer = wanted.window_buffer,
            max_wait_time_seconds = wanted.max_wait_time_seconds,
            max_queue_size = wanted.max_queue_size,
            max_message_bytes = wanted.max_message_bytes,
            retention_enabled = wanted.retention_enabled,
            retention_seconds = wanted.retention_seconds,
            completed_retention_seconds = wanted.completed_retention_seconds,
            encryption_enabled = wanted.encryption_enabled
        WHERE q.id = before.id AND before IS DISTINCT FROM wanted;
    EXCEPTION
        WHEN data_exception OR integrity_constraint_violation THEN
            GET STACKED DIAGNOSTICS detail = MESSAGE_TEXT;
            PERFORM queen.raise_invalid(
                format('queue %L cannot have the options %s: %s', configure_queue.queue_name, options, detail)
            );
    END;
    IF before.max_queue_size = 0 AND wanted.max_queue_size > 0 THEN
        PERFORM pg_advisory_xact_lock(queen.queue_lock(configure_queue.queue_name));
    END IF;
    IF (before.delayed_processing, before.window_buffer) IS DISTINCT FROM (wanted.delayed_processing, wanted.window_buffer)
    THEN
        -- Lanes that wait for the old delay are looked at again by the next pop.
        UPDATE queen.consumers AS c
        SET ready_at = clock_timestamp()
        FROM (
            SELECT w.id
            FROM queen.consumers AS w
            WHERE w.queue_id = before.id AND w.ready_at > clock_timestamp()
            ORDER BY w.id
            FOR UPDATE
        ) AS waiting
        WHERE c.id = waiting.id;
        PERFORM pg_notify('queen_ready', configure_queue.queue_name);
    END IF;
    RETURN wanted;
END
$$;

CREATE OR REPLACE FUNCTION queen.list_queues(namespace text DEFAULT NULL)
RETURNS SETOF queen.queues
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT q.* FROM queen.queues AS q
    WHERE list_queues.namespace IS NULL OR q.namespace = list_queues.namespace
    ORDER BY q.name;
$$;

-- Removes a queue with its messages, groups, subscriptions and dead letters. False where there is none.
-- Waits for pushes under way (the queue's lock), for discoveries (its row) and for pops and settlements (their rows).
CREATE OR REPLACE FUNCTION queen.delete_queue(queue_name text)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    doomed integer;
BEGIN
    PERFORM pg_advisory_xact_lock(queen.queue_lock(delete_queue.queue_name));
    SELECT q.id INTO doomed FROM queen.queues AS q WHERE q.name = delete_queue.queue_name FOR UPDATE;
    IF NOT FOUND THEN
        RETURN FALSE;
    END IF;
    PERFORM c.id FROM queen.consumers AS c WHERE c.queue_id = doomed ORDER BY c.id FOR UPDATE;
    DELETE FROM queen.consumer_states AS s USING queen.consumers AS c WHERE s.consumer_id = c.id AND c.queue_id = doomed;
    DELETE FROM queen.redeliveries AS r USING queen.consumers AS c WHERE r.consumer_id = c.id AND c.queue_id = doomed;
    DELETE FROM queen.consumers AS c WHERE c.queue_id = doomed;
    DELETE FROM queen.queue_groups AS g WHERE g.queue_id = doomed;
    DELETE FROM queen.consumer_groups_metadata AS s WHERE s.queue_name = delete_queue.queue_name;
    DELETE FROM queen.dead_letter_queue AS d WHERE d.queue_id = doomed;
    DELETE FROM queen.message_log AS m USING queen.lanes AS l WHERE m.lane_id = l.id AND l.queue_id = doomed;
    DELETE FROM queen.lanes AS l WHERE l.queue_id = doomed;
    DELETE FROM queen.partitions AS p WHERE p.queue_id = doomed;
    DELETE FROM queen.queues AS q WHERE q.id = doomed;
    RETURN TRUE;
END
$$;
