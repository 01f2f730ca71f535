-- Push: queue lock, partition locks, next seqs, rows, wake-up.

-- Lanes that a push names and that do not exist yet. Two pushes that create the same lane wait for each other on the
-- unique index, in one order. Groups find a new lane by themselves (queen.discover): the push cannot know a group that
-- is subscribing at this moment, nor that group this push.
CREATE OR REPLACE FUNCTION queen.create_lanes(queue_id integer, names text[], priorities smallint[])
RETURNS void
LANGUAGE plpgsql
AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO queen.partitions (queue_id, name)
    SELECT DISTINCT create_lanes.queue_id, n.name
    FROM unnest(create_lanes.names) AS n (name)
    ORDER BY n.name
    ON CONFLICT (queue_id, name) DO NOTHING;

    INSERT INTO queen.lanes (id, queue_id, name, priority)
    SELECT DISTINCT p.id * 10 + n.priority, create_lanes.queue_id, n.name, n.priority
    FROM unnest(create_lanes.names, create_lanes.priorities) AS n (name, priority)
    INNER JOIN queen.partitions AS p ON p.queue_id = create_lanes.queue_id AND p.name = n.name
    ORDER BY n.name, n.priority
    ON CONFLICT (queue_id, name, priority) DO NOTHING;
END
$$;

-- What a push refuses, before it locks anything. One pass over the arrays.
CREATE OR REPLACE FUNCTION queen.check_push(
    queue queen.queues, payloads text[], partitions text[], transaction_ids text[], priorities smallint[]
)
RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    bad record;
BEGIN
    SELECT u.* INTO bad
    FROM unnest(payloads, partitions, transaction_ids, priorities)
        WITH ORDINALITY AS u (payload, partition, transaction_id, priority, position)
    WHERE
        -- Beyond the end of a shorter array unnest gives NULL, which passes; a payload is always needed.
        (u.payload IS NULL AND u.position <= cardinality(payloads))
        OR octet_length(u.payload) > queue.max_message_bytes
        OR length(u.partition) NOT BETWEEN 1 AND 255
        OR length(u.transaction_id) NOT BETWEEN 1 AND 255
        OR u.priority NOT BETWEEN 0 AND 9
    LIMIT 1;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM queen.check_name('partition name', bad.partition);
    PERFORM queen.check_name('transaction id', bad.transaction_id);
    IF bad.priority NOT BETWEEN 0 AND 9 THEN
        PERFORM queen.raise_invalid(format('a message priority is 0 to 9, not %s', bad.priority));
    ELSIF bad.payload IS NULL THEN
        PERFORM queen.raise_invalid(format('message %s has no payload', bad.position));
    END IF;
    PERFORM queen.raise_invalid(format(
        'the payload of message %s has %s bytes; max_message_bytes of queue %L is %s',
        bad.position, octet_length(bad.payload), queue.name, queue.max_message_bytes
    ));
END
$$;

-- Stores messages, in order, and answers in input order: queued, or duplicate with the first one's id and seq.
--
-- partitions, priorities and trace_ids are NULL, or hold one value for all messages, or one for each;
-- transaction_ids are NULL or one for each (a NULL among them gets a random id).
-- origin_transaction_ids and requeued_from are for messages that come back from the dead letters or from an archive.
--
-- Interleavings:
--   push | push, same partition     the second waits on the partition's lock until the first has ended. Only the
--                                   statements after the lock read the last seq, in snapshots that see the first.
--                                   So seqs have no gaps, their order is commit order, and dedupe sees everything.
--   push | push, other partitions   neither waits. Several partitions are locked by ascending id: no circle.
--   push | pop calls it drained     pop sets ready_at NULL under the partition's lock, after looking for messages again.
--                                   Either it waits for nothing and finds our messages, or we come later and see NULL.
--   push | first contact of group   the group's row is not visible to us: it starts as ready, never as drained.
--   push | delete_queue             delete waits for us, or we wait for it and find no queue.
--   push | push, max_queue_size     the capacity lock lets one after the other count.
CREATE OR REPLACE FUNCTION queen.push(
    queue_name text,
    payloads text[],
    partitions text[] DEFAULT NULL,
    transaction_ids text[] DEFAULT NULL,
    trace_ids uuid[] DEFAULT NULL,
    priorities smallint[] DEFAULT NULL,
    is_encrypted boolean DEFAULT FALSE,
    origin_transaction_ids text[] DEFAULT NULL,
    requeued_from uuid[] DEFAULT NULL
)
RETURNS TABLE (
    status text, message_id uuid, transaction_id text, partition text, seq bigint, priority smallint
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = OFF
SET enable_bitmapscan = OFF
SET jit = OFF
AS $$
#variable_conflict use_column
DECLARE
    -- More partitions than this in one push take the queue's lock alone, instead of filling the lock table.
    many_partitions CONSTANT integer := 1000;
    n CONSTANT integer := coalesce(cardinality(push.payloads), 0);
    names text[] := coalesce(push.partitions, '{Default}');
    ranks smallint[] := coalesce(push.priorities, '{0}');
    ids text[] := push.transaction_ids;
    spread boolean;
    queue queen.queues;
    lane_ids bigint[];   -- of each message
    locked bigint[];     -- the partitions, ascending
    is_new boolean[];
    seqs bigint[];
    home_lanes bigint[]; -- where each message is: of a duplicate, the first one's lane
    stamps timestamptz[];
    created boolean := FALSE;
    stamp timestamptz;
    depth_before bigint;
    woken integer;
BEGIN
    IF n = 0 THEN
        RETURN;
    END IF;
    IF
        cardinality(names) NOT IN (1, n) OR cardinality(ranks) NOT IN (1, n)
        OR cardinality(ids) <> n OR cardinality(trace_ids) NOT IN (1, n)
    THEN
        PERFORM queen.raise_invalid(format('%s payloads need as many partitions, transaction ids, trace ids and priorities', n));
    END IF;
    spread := cardinality(names) > 1 OR cardinality(ranks) > 1;
    IF cardinality(names) > many_partitions AND (SELECT count(DISTINCT x) FROM unnest(names) AS x) > many_partitions THEN
        PERFORM pg_advisory_xact_lock(queen.queue_lock(push.queue_name));
        locked := '{}';
    ELSE
        PERFORM pg_advisory_xact_lock_shared(queen.queue_lock(push.queue_name));
    END IF;

    SELECT q.* INTO queue FROM queen.queues AS q WHERE q.name = push.queue_name;
    IF NOT FOUND THEN
        PERFORM queen.raise_unknown_queue(push.queue_name);
    END IF;
    IF queue.encryption_enabled <> push.is_encrypted AND push.requeued_from IS NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'QN005',
            MESSAGE = format(
                'queue %L %s; the push says the opposite', queue.name,
                CASE WHEN queue.encryption_enabled THEN 'takes encrypted payloads only' ELSE 'is not encrypted' END
            );
    END IF;
    PERFORM queen.check_push(queue, payloads, names, ids, ranks);

    IF NOT spread THEN
        SELECT array_fill(l.id, ARRAY[n]) INTO lane_ids
        FROM queen.lanes AS l
        WHERE l.queue_id = queue.id AND l.name = names[1] AND l.priority = ranks[1];
    END IF;
    IF lane_ids IS NULL THEN
        names := CASE WHEN cardinality(names) = 1 THEN array_fill(names[1], ARRAY[n]) ELSE names END;
        ranks := CASE WHEN cardinality(ranks) = 1 THEN array_fill(ranks[1], ARRAY[n]) ELSE ranks END;
        SELECT array_agg(coalesce(x.name, 'Default') ORDER BY x.position) INTO names
        FROM unnest(names) WITH ORDINALITY AS x (name, position);
        SELECT array_agg(coalesce(x.rank, 0::smallint) ORDER BY x.position) INTO ranks
        FROM unnest(ranks) WITH ORDINALITY AS x (rank, position);
        LOOP
            SELECT array_agg(l.id ORDER BY x.position) INTO lane_ids
            FROM unnest(names, ranks) WITH ORDINALITY AS x (name, rank, position)
            LEFT JOIN LATERAL (
                SELECT f.id
                FROM queen.lanes AS f
                WHERE f.queue_id = queue.id AND f.name = x.name AND f.priority = x.rank
                LIMIT 1
            ) AS l ON TRUE;
            EXIT WHEN array_position(lane_ids, NULL) IS NULL;
            IF created THEN
                RAISE EXCEPTION USING ERRCODE = 'serialization_failure', MESSAGE = 'a partition was created meanwhile';
            END IF;
            PERFORM queen.create_lanes(queue.id, names, ranks);
            created := TRUE;
        END LOOP;
    END IF;

    IF queue.max_queue_size > 0 THEN
        PERFORM pg_advisory_xact_lock(queen.capacity_lock(queue.id));
    END IF;
    IF NOT spread THEN
        PERFORM pg_advisory_xact_lock(queen.partition_lock(lane_ids[1] / 10));
    ELSIF locked IS NULL THEN
        PERFORM pg_advisory_xact_lock(queen.partition_lock(p.id))
        FROM (SELECT DISTINCT x.id / 10 AS id FROM unnest(lane_ids) AS x (id) ORDER BY 1) AS p;
    END IF;

    IF queue.max_queue_size > 0 THEN
        depth_before := queen.largest_backlog(queue.id);
    END IF;

    -- The first statement that reads messages: its snapshot is taken after the locks.
    stamp := clock_timestamp();
    IF spread OR ids IS NOT NULL THEN
        SELECT
            array_agg(d.is_new ORDER BY d.position),
            array_agg(d.seq ORDER BY d.position),
            array_agg(d.home_lane ORDER BY d.position),
            array_agg(d.stamp ORDER BY d.position),
            array_agg(d.id ORDER BY d.position)
        INTO is_new, seqs, home_lanes, stamps, ids
        FROM (
            SELECT
                c.position,
                c.id,
                c.is_new,
                c.stamp,
                -- Of two in this batch the second answers with the first one's place.
                coalesce(c.known_seq, first_value(c.new_seq) OVER twins) AS seq,
                coalesce(c.known_lane, first_value(c.lane_id) OVER twins) AS home_lane
            FROM (
                SELECT
                    b.*,
                    max(b.tail_seq) OVER (PARTITION BY b.lane_id)
                    + count(*) FILTER (WHERE b.is_new) OVER (PARTITION BY b.lane_id ORDER BY b.position) AS new_seq,
                    greatest(push_stamp.at, max(b.tail_at) OVER (PARTITION BY b.lane_id)) AS stamp
                FROM (
                    SELECT
                        a.*,
                        a.known_seq IS NULL AND a.twin = 1 AS is_new,
                        -- The lane's end is looked up once per lane, at its first message.
                        CASE WHEN a.place = 1 THEN coalesce(
                            (
                                SELECT m.seq FROM queen.message_log AS m
                                WHERE m.lane_id = a.lane_id ORDER BY m.seq DESC LIMIT 1
                            ),
                            (SELECT l.floor_seq FROM queen.lanes AS l WHERE l.id = a.lane_id)
                        ) END AS tail_seq,
                        CASE WHEN a.place = 1 THEN coalesce(
                            (
                                SELECT m.created_at FROM queen.message_log AS m
                                WHERE m.lane_id = a.lane_id ORDER BY m.seq DESC LIMIT 1
                            ),
                            (SELECT l.floor_created_at FROM queen.lanes AS l WHERE l.id = a.lane_id)
                        ) END AS tail_at
                    FROM (
                        SELECT
                            i.*,
                            known.seq AS known_seq,
                            known.lane_id AS known_lane,
                            row_number() OVER (PARTITION BY i.id_hash, i.id ORDER BY i.position) AS twin,
                            row_number() OVER (PARTITION BY i.lane_id ORDER BY i.position) AS place
                        FROM (
                            SELECT
                                u.position,
                                u.lane_id,
                                coalesce(u.id, gen_random_uuid()::text) COLLATE "C" AS id,
                                hashtextextended(u.id, u.lane_id / 10) AS id_hash
                            FROM unnest(lane_ids, ids) WITH ORDINALITY AS u (lane_id, id, position)
                        ) AS i
                        LEFT JOIN LATERAL (
                            SELECT m.seq, m.lane_id
                            FROM queen.message_log AS m
                            WHERE
                                hashtextextended(m.transaction_id, m.lane_id / 10) = i.id_hash
                                AND m.transaction_id = i.id
                                AND m.lane_id / 10 = i.lane_id / 10
                            LIMIT 1
                        ) AS known ON TRUE
                    ) AS a
                ) AS b
                CROSS JOIN (SELECT stamp AS at) AS push_stamp
            ) AS c
            WINDOW twins AS (PARTITION BY c.id_hash, c.id ORDER BY c.position)
        ) AS d;
    ELSE
        -- One lane and ids of our own making: nothing can be a duplicate.
        SELECT
            array_agg(TRUE),
            array_agg(e.tail_seq + g.i),
            lane_ids,
            array_fill(greatest(stamp, e.tail_at), ARRAY[n]),
            array_agg(gen_random_uuid()::text)
        INTO is_new, seqs, home_lanes, stamps, ids
        FROM (
            SELECT coalesce(t.seq, l.floor_seq) AS tail_seq, coalesce(t.created_at, l.floor_created_at) AS tail_at
            FROM queen.lanes AS l
            LEFT JOIN LATERAL (
                SELECT m.seq, m.created_at FROM queen.message_log AS m
                WHERE m.lane_id = l.id ORDER BY m.seq DESC LIMIT 1
            ) AS t ON TRUE
            WHERE l.id = lane_ids[1]
        ) AS e
        CROSS JOIN generate_series(1, n) AS g (i)
        GROUP BY e.tail_at;
    END IF;

    IF
        queue.max_queue_size > 0
        AND depth_before + coalesce(cardinality(array_positions(is_new, TRUE)), 0) > queue.max_queue_size
        AND TRUE = ANY (is_new)
    THEN
        RAISE EXCEPTION USING
            ERRCODE = 'QN002',
            MESSAGE = format(
                'queue %L holds %s of at most %s messages; %s more do not fit, nothing was stored',
                queue.name, depth_before, queue.max_queue_size, cardinality(array_positions(is_new, TRUE))
            );
    END IF;

    INSERT INTO queen.message_log (
        lane_id, seq, created_at, trace_id, is_encrypted, transaction_id, payload, requeued_from, origin_transaction_id
    )
    SELECT
        u.lane_id,
        u.seq,
        u.stamp,
        CASE WHEN cardinality(push.trace_ids) = 1 THEN push.trace_ids[1] ELSE u.trace_id END,
        push.is_encrypted,
        u.id,
        u.payload::json,
        u.requeued_from,
        u.origin_id
    FROM unnest(
        lane_ids, seqs, stamps, push.trace_ids, ids, push.payloads, is_new, push.requeued_from,
        push.origin_transaction_ids
    ) AS u (lane_id, seq, stamp, trace_id, id, payload, is_new, requeued_from, origin_id)
    WHERE u.is_new;

    -- Drained groups of these lanes have messages again. Rows that are not drained are not touched.
    UPDATE queen.consumers AS c
    SET ready_at = stamp + make_interval(secs => queue.delayed_processing)
    FROM (
        SELECT d.id
        FROM queen.consumers AS d
        WHERE d.lane_id = ANY (lane_ids) AND d.ready_at IS NULL
        ORDER BY d.id
        FOR UPDATE
    ) AS drained
    WHERE c.id = drained.id;
    GET DIAGNOSTICS woken = ROW_COUNT;
    -- The only moments worth a NOTIFY, which makes commits wait for each other.
    IF woken > 0 OR created THEN
        PERFORM pg_notify('queen_ready', queue.name);
    END IF;

    RETURN QUERY
    SELECT
        CASE WHEN u.is_new THEN 'queued' ELSE 'duplicate' END,
        queen.message_id(u.lane_id, u.seq),
        u.id,
        coalesce(u.name, names[1]),
        u.seq,
        (u.lane_id % 10)::smallint
    FROM unnest(is_new, home_lanes, seqs, ids, names) AS u (is_new, lane_id, seq, id, name);
END
$$;
