-- Dead letters: list, requeue, purge.

CREATE OR REPLACE FUNCTION queen.list_dead_letters(
    queue_name text, consumer_group text DEFAULT NULL, partition text DEFAULT NULL, after bigint DEFAULT NULL,
    max_rows integer DEFAULT 100, include_requeued boolean DEFAULT FALSE
)
RETURNS SETOF queen.dead_letter
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    qid CONSTANT integer := queen.queue_id_of(list_dead_letters.queue_name);
BEGIN
    IF list_dead_letters.max_rows IS NULL OR list_dead_letters.max_rows < 1 THEN
        PERFORM queen.raise_invalid(format(
            'a page has at least 1 row, not %s', coalesce(list_dead_letters.max_rows::text, 'NULL')
        ));
    END IF;
    RETURN QUERY
    SELECT
        d.id, list_dead_letters.queue_name, d.partition_name, d.priority, d.seq, d.message_id, d.consumer_group,
        d.transaction_id, d.trace_id, d.payload, d.is_encrypted, d.origin_transaction_id, d.reason, d.error_message,
        d.retry_count, d.original_created_at, d.failed_at, d.requeued_at, d.requeued_message_id
    FROM queen.dead_letter_queue AS d
    WHERE
        d.queue_id = qid
        AND (list_dead_letters.consumer_group IS NULL OR d.consumer_group = list_dead_letters.consumer_group)
        AND (list_dead_letters.partition IS NULL OR d.partition_name = list_dead_letters.partition)
        AND (list_dead_letters.after IS NULL OR d.id < list_dead_letters.after)
        AND (list_dead_letters.include_requeued OR d.requeued_at IS NULL)
    ORDER BY d.id DESC
    LIMIT list_dead_letters.max_rows;
END
$$;

-- Gives a group its rows for lanes that it has not met, whatever its subscription covers.
CREATE OR REPLACE FUNCTION queen.meet_lanes(consumer_group text, queue queen.queues, lane_ids bigint[])
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
BEGIN
    PERFORM pg_advisory_xact_lock(queen.discovery_lock(queue.id, meet_lanes.consumer_group));
    INSERT INTO queen.consumers (lane_id, queue_id, priority, consumer_group, start_seq, ready_at)
    SELECT
        f.id, f.queue_id, f.priority, meet_lanes.consumer_group,
        queen.start_seq(queen.subscription_of(meet_lanes.consumer_group, queue, f.name), f), clock_timestamp()
    FROM (
        SELECT l.* FROM queen.lanes AS l WHERE l.id = ANY (meet_lanes.lane_ids) ORDER BY l.id FOR SHARE
    ) AS l
    INNER JOIN queen.lanes AS f ON f.id = l.id
    ON CONFLICT (lane_id, consumer_group) DO NOTHING;
    INSERT INTO queen.queue_groups (queue_id, consumer_group) VALUES (queue.id, meet_lanes.consumer_group)
    ON CONFLICT DO NOTHING;
    PERFORM queen.note_priorities(meet_lanes.consumer_group, queue.id);
END
$$;

-- Pushes dead letters back to their partitions, as new messages: same payload and trace, requeued_from names the
-- original. Only the group that gave up sees them: for the other groups that exist they count as settled.
-- (A group that has not met the partition yet meets it now, so that it can be told.)
-- Asked again for the same ids, it answers with what they became. The oldest first.
--   requeue | requeue   the rows of the dead letters are locked by ascending id; the second finds them requeued.
CREATE OR REPLACE FUNCTION queen.requeue_dead_letters(
    queue_name text, ids bigint[] DEFAULT NULL, consumer_group text DEFAULT NULL, max_rows integer DEFAULT 1000
)
RETURNS SETOF queen.requeued_message
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    qid CONSTANT integer := queen.queue_id_of(requeue_dead_letters.queue_name);
    chosen bigint[];
    unknown bigint;
    encrypted boolean;
    moved record;
    consumer queen.consumers;
    state queen.consumer_states;
    new_state queen.consumer_states;
BEGIN
    IF requeue_dead_letters.max_rows IS NULL OR requeue_dead_letters.max_rows < 1 THEN
        PERFORM queen.raise_invalid(format(
            'max_rows is at least 1, not %s', coalesce(requeue_dead_letters.max_rows::text, 'NULL')
        ));
    END IF;
    SELECT x INTO unknown FROM unnest(requeue_dead_letters.ids) AS x
    WHERE NOT EXISTS (SELECT 1 FROM queen.dead_letter_queue AS d WHERE d.id = x AND d.queue_id = qid)
    LIMIT 1;
    IF FOUND THEN
        PERFORM queen.raise_invalid(format('queue %L has no dead letter %s', requeue_dead_letters.queue_name, unknown));
    END IF;
    SELECT array_agg(c.id) INTO chosen
    FROM (
        SELECT d.id FROM queen.dead_letter_queue AS d
        WHERE
            d.queue_id = qid
            AND (
                d.id = ANY (requeue_dead_letters.ids)
                OR (requeue_dead_letters.ids IS NULL AND d.requeued_at IS NULL)
            )
            AND (requeue_dead_letters.consumer_group IS NULL OR d.consumer_group = requeue_dead_letters.consumer_group)
        ORDER BY d.id
        LIMIT CASE WHEN requeue_dead_letters.ids IS NULL THEN requeue_dead_letters.max_rows END
        FOR UPDATE
    ) AS c;

    PERFORM queen.meet_lanes(g.consumer_group, q, ARRAY(
        SELECT DISTINCT d.lane_id FROM queen.dead_letter_queue AS d WHERE d.id = ANY (chosen) AND d.requeued_at IS NULL
    ))
    FROM queen.queues AS q
    CROSS JOIN LATERAL queen.groups_of(q) AS g (consumer_group)
    WHERE q.id = qid AND chosen IS NOT NULL;

    FOR encrypted IN
        SELECT DISTINCT d.is_encrypted FROM queen.dead_letter_queue AS d
        WHERE d.id = ANY (chosen) AND d.requeued_at IS NULL
    LOOP
        FOR moved IN
            SELECT i.id, p.message_id, i.consumer_group
            FROM (
                SELECT array_agg(d ORDER BY d.id) AS rows FROM queen.dead_letter_queue AS d
                WHERE d.id = ANY (chosen) AND d.requeued_at IS NULL AND d.is_encrypted = encrypted
            ) AS a
            CROSS JOIN LATERAL (
                SELECT p.*, row_number() OVER () AS position
                FROM queen.push(
                    requeue_dead_letters.queue_name,
                    (SELECT array_agg(r.payload::text ORDER BY r.id) FROM unnest(a.rows) AS r),
                    (SELECT array_agg(r.partition_name ORDER BY r.id) FROM unnest(a.rows) AS r),
                    NULL,
                    (SELECT array_agg(r.trace_id ORDER BY r.id) FROM unnest(a.rows) AS r),
                    (SELECT array_agg(r.priority ORDER BY r.id) FROM unnest(a.rows) AS r),
                    encrypted,
                    (SELECT array_agg(coalesce(r.origin_transaction_id, r.transaction_id) ORDER BY r.id) FROM unnest(a.rows) AS r),
                    (SELECT array_agg(r.message_id ORDER BY r.id) FROM unnest(a.rows) AS r)
                ) AS p
            ) AS p
            INNER JOIN LATERAL (
                SELECT r.id, r.consumer_group, row_number() OVER (ORDER BY r.id) AS position FROM unnest(a.rows) AS r
            ) AS i ON i.position = p.position
        LOOP
            UPDATE queen.dead_letter_queue AS d
            SET requeued_at = clock_timestamp(), requeued_message_id = moved.message_id
            WHERE d.id = moved.id;
            FOR consumer IN
                SELECT c.* FROM queen.consumers AS c
                WHERE
                    c.lane_id = queen.message_lane(moved.message_id) AND c.consumer_group <> moved.consumer_group
                ORDER BY c.id + 0
                FOR UPDATE
            LOOP
                state := queen.state_of(consumer);
                new_state := state;
                new_state.ahead := state.ahead
                    + queen.span(queen.message_seq(moved.message_id), queen.message_seq(moved.message_id));
                new_state.cursor := queen.fold(state.cursor, new_state.ahead);
                new_state.ahead := queen.beyond(new_state.cursor, new_state.ahead);
                PERFORM queen.replace_state(state, new_state);
            END LOOP;
        END LOOP;
    END LOOP;

    RETURN QUERY
    SELECT d.id, d.requeued_message_id, queen.message_seq(d.requeued_message_id), d.partition_name
    FROM queen.dead_letter_queue AS d
    WHERE d.id = ANY (chosen)
    ORDER BY d.id;
END
$$;

CREATE OR REPLACE FUNCTION queen.purge_dead_letters(
    queue_name text,
    ids bigint[] DEFAULT NULL,
    consumer_group text DEFAULT NULL,
    older_than_seconds integer DEFAULT NULL
)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    qid CONSTANT integer := queen.queue_id_of(purge_dead_letters.queue_name);
    purged bigint;
BEGIN
    IF purge_dead_letters.older_than_seconds < 0 THEN
        PERFORM queen.raise_invalid(format('older_than_seconds is not negative: %s', purge_dead_letters.older_than_seconds));
    END IF;
    DELETE FROM queen.dead_letter_queue AS d
    WHERE
        d.queue_id = qid
        AND (purge_dead_letters.ids IS NULL OR d.id = ANY (purge_dead_letters.ids))
        AND (purge_dead_letters.consumer_group IS NULL OR d.consumer_group = purge_dead_letters.consumer_group)
        AND (
            purge_dead_letters.older_than_seconds IS NULL
            OR d.failed_at < clock_timestamp() - make_interval(secs => purge_dead_letters.older_than_seconds)
        );
    GET DIAGNOSTICS purged = ROW_COUNT;
    RETURN purged;
END
$$;
