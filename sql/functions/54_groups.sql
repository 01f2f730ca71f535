-- Consumer groups: seek, list, delete.

-- Moves a group's cursor on every lane of a queue, or of one partition. Leases on them end: their holders lost them.
-- A group that has never popped exists from now on. Returns the number of lanes.
-- The consumers' rows are locked by ascending id, and states read afterwards: as settle.
CREATE OR REPLACE FUNCTION queen.seek(
    queue_name text, consumer_group text DEFAULT NULL, to_position text DEFAULT NULL, to_time timestamptz DEFAULT NULL,
    partition text DEFAULT NULL
)
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
#variable_conflict use_column
DECLARE
    reader CONSTANT text := coalesce(seek.consumer_group, '__QUEUE_MODE__');
    qid CONSTANT integer := queen.queue_id_of(seek.queue_name);
    consumer queen.consumers;
    state queen.consumer_states;
    new_state queen.consumer_states;
    moved integer := 0;
BEGIN
    IF num_nonnulls(seek.to_position, seek.to_time) <> 1 OR seek.to_position NOT IN ('beginning', 'end') THEN
        PERFORM queen.raise_invalid(format(
            'seek goes to ''beginning'', ''end'' or a time, not to %s', coalesce(quote_literal(seek.to_position), 'nothing')
        ));
    END IF;
    PERFORM queen.check_name('consumer group', reader);
    PERFORM pg_advisory_xact_lock(queen.subscription_lock(reader, seek.queue_name, seek.partition, NULL, NULL));
    PERFORM pg_advisory_xact_lock(queen.discovery_lock(qid, reader));
    PERFORM queen.discover(reader, ARRAY[qid], seek.queue_name, seek.partition, NULL, NULL, 'all', NULL, clock_timestamp());
    IF seek.partition IS NOT NULL AND NOT EXISTS (
        SELECT 1 FROM queen.lanes AS l WHERE l.queue_id = qid AND l.name = seek.partition
    ) THEN
        PERFORM queen.raise_invalid(format('queue %L has no partition %L', seek.queue_name, seek.partition));
    END IF;
    PERFORM 1
    FROM queen.consumers AS c
    INNER JOIN queen.lanes AS l ON l.id = c.lane_id
    WHERE
        c.queue_id = qid AND c.consumer_group = reader AND (seek.partition IS NULL OR l.name = seek.partition)
    ORDER BY c.id
    FOR UPDATE OF c;
    FOR consumer IN
        SELECT c.*
        FROM queen.consumers AS c
        INNER JOIN queen.lanes AS l ON l.id = c.lane_id
        WHERE
            c.queue_id = qid AND c.consumer_group = reader AND (seek.partition IS NULL OR l.name = seek.partition)
    LOOP
        state := queen.state_of(consumer);
        IF state.lease_id IS NOT NULL THEN
            INSERT INTO queen.deliveries (
                lane_id, first_seq, last_seq, popped_at, ended_at, completed, failed, rejected, released, expired,
                attempt, priority, queue_name, partition_name, consumer_group
            )
            SELECT
                l.id, state.first_seq, state.last_seq, state.popped_at, clock_timestamp(), state.completed, state.failed,
                state.rejected, state.released + queen.size(state.held), 0, state.attempt, l.priority, seek.queue_name,
                l.name, reader
            FROM queen.lanes AS l WHERE l.id = consumer.lane_id;
        END IF;
        new_state := queen.without_lease(state);
        new_state.cursor := CASE
            WHEN seek.to_position = 'beginning' THEN
                (SELECT l.floor_seq FROM queen.lanes AS l WHERE l.id = consumer.lane_id)
            ELSE queen.seq_before(consumer.lane_id, coalesce(seek.to_time, 'infinity'))
        END;
        new_state.ahead := '{}';
        new_state.suspect_through := 0;
        new_state.retry_at := NULL;
        new_state.redelivering := 0;
        DELETE FROM queen.redeliveries AS r WHERE r.consumer_id = consumer.id;
        PERFORM queen.replace_state(state, new_state);
        moved := moved + 1;
    END LOOP;
    UPDATE queen.consumers AS c
    SET ready_at = clock_timestamp()
    FROM queen.lanes AS l
    WHERE
        l.id = c.lane_id AND c.queue_id = qid AND c.consumer_group = reader
        AND (seek.partition IS NULL OR l.name = seek.partition);
    PERFORM pg_notify('queen_ready', seek.queue_name);
    RETURN moved;
END
$$;

CREATE OR REPLACE FUNCTION queen.list_consumer_groups(queue_name text DEFAULT NULL)
RETURNS SETOF queen.group_summary
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    IF list_consumer_groups.queue_name IS NOT NULL THEN
        PERFORM queen.queue_id_of(list_consumer_groups.queue_name);
    END IF;
    RETURN QUERY
    SELECT
        g.consumer_group,
        q.name,
        coalesce(s.subscription_mode, 'all'),
        coalesce(s.created_at, g.created_at),
        (SELECT count(*) FROM queen.consumers AS c WHERE c.queue_id = q.id AND c.consumer_group = g.consumer_group),
        b.pending,
        b.in_flight,
        (
            SELECT max(p.settled_at) FROM queen.partition_consumers AS p
            WHERE p.queue_name = q.name AND p.consumer_group = g.consumer_group
        )
    FROM queen.queue_groups AS g
    INNER JOIN queen.queues AS q ON q.id = g.queue_id
    LEFT JOIN LATERAL (
        SELECT r.subscription_mode, r.created_at FROM queen.subscription_of(g.consumer_group, q, NULL) AS r
    ) AS s ON TRUE
    CROSS JOIN LATERAL (
        SELECT coalesce(sum(x.pending), 0)::bigint AS pending, coalesce(sum(x.in_flight), 0)::bigint AS in_flight
        FROM queen.group_backlog(q.id, g.consumer_group) AS x
    ) AS b
    WHERE list_consumer_groups.queue_name IS NULL OR q.name = list_consumer_groups.queue_name
    ORDER BY q.name, g.consumer_group;
END
$$;

-- Forgets a group, on one queue or everywhere: cursors, leases, subscriptions. Its dead letters stay.
-- Returns on how many queues it existed. Waits for discoveries (the group's lock) and pops (their rows) under way.
CREATE OR REPLACE FUNCTION queen.delete_consumer_group(consumer_group text, queue_name text DEFAULT NULL)
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    reader CONSTANT text := coalesce(delete_consumer_group.consumer_group, '__QUEUE_MODE__');
    doomed integer[];
BEGIN
    IF delete_consumer_group.queue_name IS NOT NULL THEN
        doomed := ARRAY[queen.queue_id_of(delete_consumer_group.queue_name)];
    ELSE
        SELECT coalesce(array_agg(g.queue_id ORDER BY g.queue_id), '{}') INTO doomed
        FROM queen.queue_groups AS g WHERE g.consumer_group = reader;
    END IF;
    PERFORM pg_advisory_xact_lock(queen.discovery_lock(x.id, reader)) FROM unnest(doomed) AS x (id);
    PERFORM 1 FROM queen.consumers AS c
    WHERE c.queue_id = ANY (doomed) AND c.consumer_group = reader ORDER BY c.id FOR UPDATE;
    DELETE FROM queen.consumer_states AS s USING queen.consumers AS c
    WHERE s.consumer_id = c.id AND c.queue_id = ANY (doomed) AND c.consumer_group = reader;
    DELETE FROM queen.redeliveries AS r USING queen.consumers AS c
    WHERE r.consumer_id = c.id AND c.queue_id = ANY (doomed) AND c.consumer_group = reader;
    DELETE FROM queen.consumers AS c WHERE c.queue_id = ANY (doomed) AND c.consumer_group = reader;
    DELETE FROM queen.consumer_groups_metadata AS s
    WHERE
        s.consumer_group = reader
        AND (delete_consumer_group.queue_name IS NULL OR s.queue_name = delete_consumer_group.queue_name);
    WITH deleted AS (
        DELETE FROM queen.queue_groups AS g
        WHERE g.queue_id = ANY (doomed) AND g.consumer_group = reader
        RETURNING 1
    )
    SELECT array_agg(1) INTO doomed FROM deleted;
    RETURN coalesce(cardinality(doomed), 0);
END
$$;
