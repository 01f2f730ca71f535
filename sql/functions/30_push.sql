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
    CROSS JOIN LATERAL (
        SELECT r.id FROM queen.partitions AS r
        WHERE r.queue_id = create_lanes.queue_id AND r.name = n.name
        LIMIT 1
    ) AS p
    ORDER BY n.name, n.priority
    ON CONFLICT (queue_id, name, priority) DO NOTHING;
END
$$;

-- What a push refuses. One pass over the arrays.
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

-- A transaction id whose bytes are too many, or none: its characters count.
CREATE OR REPLACE FUNCTION queen.checked_id(transaction_id text)
RETURNS text
LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM queen.check_name('transaction id', transaction_id);
    RETURN transaction_id;
END
$$;

-- The last seq of a lane and its time: the last row's, or the floor.
CREATE OR REPLACE FUNCTION queen.tail_of(lane_id bigint)
RETURNS queen.lane_tail
LANGUAGE sql VOLATILE
AS $$
    SELECT coalesce(t.seq, l.floor_seq) AS seq, coalesce(t.created_at, l.floor_created_at) AS created_at
    FROM queen.lanes AS l
    LEFT JOIN LATERAL (
        SELECT m.seq, m.created_at FROM queen.message_log AS m
        WHERE m.lane_id = l.id ORDER BY m.seq DESC LIMIT 1
    ) AS t ON TRUE
    WHERE l.id = tail_of.lane_id;
$$;

-- For each message of a batch whether it is new, and its place: its own, or the first one's that it repeats.
-- The caller holds the partitions' locks.
CREATE OR REPLACE FUNCTION queen.place_messages(
    lane_ids bigint[], transaction_ids text[], stamp timestamptz,
    OUT is_new boolean[], OUT seqs bigint[], OUT home_lanes bigint[], OUT stamps timestamptz[], OUT ids text[],
    OUT salts smallint[]
)
LANGUAGE sql VOLATILE
AS $$
    WITH input AS (
        SELECT
            u.position,
            coalesce(u.lane_id, place_messages.lane_ids[1]) AS lane_id,
            coalesce(u.id, gen_random_uuid()::text) COLLATE "C" AS id,
            hashtextextended(u.id, coalesce(u.lane_id, place_messages.lane_ids[1]) / 10) AS id_hash
        FROM unnest(place_messages.lane_ids, place_messages.transaction_ids)
            WITH ORDINALITY AS u (lane_id, id, position)
    ),

    compared AS (
        SELECT
            i.*,
            known.seq AS known_seq,
            known.lane_id AS known_lane,
            row_number() OVER (PARTITION BY i.lane_id ORDER BY i.position) AS place,
            known.seq IS NULL AND row_number() OVER (PARTITION BY i.id_hash, i.id ORDER BY i.position) = 1 AS is_new,
            -- Other ids with the same hash, stored and in this batch, take the salts before this one's.
            nullif(
                (
                    SELECT count(*) FROM generate_series(0, 7) AS s (salt)
                    INNER JOIN queen.message_log AS m
                        ON int8xor(hashtextextended(m.transaction_id, m.lane_id / 10), coalesce(m.id_salt, 0)::bigint)
                        = int8xor(i.id_hash, s.salt::bigint)
                ) + dense_rank() OVER (PARTITION BY i.id_hash ORDER BY i.id) - 1,
                0
            )::smallint AS salt
        FROM input AS i
        LEFT JOIN LATERAL (
            SELECT m.seq, m.lane_id
            FROM generate_series(0, 7) AS s (salt)
            INNER JOIN queen.message_log AS m
                ON int8xor(hashtextextended(m.transaction_id, m.lane_id / 10), coalesce(m.id_salt, 0)::bigint)
                = int8xor(i.id_hash, s.salt::bigint)
            WHERE m.transaction_id = i.id AND m.lane_id / 10 = i.lane_id / 10
            LIMIT 1
        ) AS known ON TRUE
    ),

    -- The lane's end is looked up once per lane, at its first message.
    tailed AS (
        SELECT
            c.*,
            CASE WHEN c.place = 1 THEN queen.tail_of(c.lane_id) END AS tail
        FROM compared AS c
    ),

    numbered AS (
        SELECT
            t.*,
            max((t.tail).seq) OVER (PARTITION BY t.lane_id)
            + count(*) FILTER (WHERE t.is_new) OVER (PARTITION BY t.lane_id ORDER BY t.position) AS new_seq,
            greatest(place_messages.stamp, max((t.tail).created_at) OVER (PARTITION BY t.lane_id)) AS new_stamp
        FROM tailed AS t
    ),

    -- Of two in this batch the second answers with the first one's place.
    placed AS (
        SELECT
            n.position,
            n.id,
            n.is_new,
            n.new_stamp,
            n.salt,
            coalesce(n.known_seq, first_value(n.new_seq) OVER twins) AS seq,
            coalesce(n.known_lane, first_value(n.lane_id) OVER twins) AS home_lane
        FROM numbered AS n
        WINDOW twins AS (PARTITION BY n.id_hash, n.id ORDER BY n.position)
    )

    SELECT
        array_agg(p.is_new ORDER BY p.position),
        array_agg(p.seq ORDER BY p.position),
        array_agg(p.home_lane ORDER BY p.position),
        array_agg(p.new_stamp ORDER BY p.position),
        array_agg(p.id ORDER BY p.position),
        CASE WHEN count(p.salt) > 0 THEN array_agg(p.salt ORDER BY p.position) END
    FROM placed AS p;
$$;

-- The same where nothing is repeated, as far as anybody knows: the next place in each message's lane.
CREATE OR REPLACE FUNCTION queen.next_places(
    lane_ids bigint[], stamp timestamptz, OUT seqs bigint[], OUT stamps timestamptz[]
)
LANGUAGE sql VOLATILE
AS $$
    SELECT
        array_agg(b.last_seq + b.place ORDER BY b.position),
        array_agg(greatest(next_places.stamp, b.last_at) ORDER BY b.position)
    FROM (
        SELECT
            a.position,
            a.place,
            max((a.tail).seq) OVER (PARTITION BY a.lane_id) AS last_seq,
            max((a.tail).created_at) OVER (PARTITION BY a.lane_id) AS last_at
        FROM (
            SELECT
                u.lane_id,
                u.position,
                u.place,
                CASE WHEN u.place = 1 THEN queen.tail_of(u.lane_id) END AS tail
            FROM (
                SELECT x.*, row_number() OVER (PARTITION BY x.lane_id ORDER BY x.position) AS place
                FROM unnest(next_places.lane_ids) WITH ORDINALITY AS x (lane_id, position)
            ) AS u
        ) AS a
    ) AS b;
$$;

-- Stores messages, in order, and answers in one row (queen.pushed_batch): at a thousand messages, an answer of a
-- thousand rows costs a fifth of the whole. Clients call this; queen.push shows the same as a table.
--
-- partitions, priorities and trace_ids are NULL, or hold one value for all messages, or one for each;
-- transaction_ids are NULL or one for each (a NULL among them becomes the message's id).
-- origin_transaction_ids and requeued_from are for messages that come back from the dead letters or from an archive.
--
-- Interleavings:
--   push | push, same partition     the second waits on the partition's lock until the first has ended. Only the
--                                   statements after the lock read the last seq, in snapshots that see the first.
--                                   So seqs have no gaps, their order is commit order, and dedupe sees everything.
--   push | push, other partitions   neither waits. Several partitions are locked by ascending id: no circle.
--   push | pop calls it drained     pop sets ready_at NULL under the partition's lock, after looking again.
--                                   Either it waits for nothing and finds our messages, or we come later and see NULL.
--   push | first contact of group   the group's row is not visible to us: it starts as ready, never as drained.
--   push | delete_queue             delete waits for us, or we wait for it and find no queue.
--   push | push, max_queue_size     the capacity lock lets one after the other count.
-- In repeatable read and above the snapshot is older than the locks: whatever came between is refused as 40001, by the
-- unique indexes for messages, by the row locks for consumers.
CREATE OR REPLACE FUNCTION queen.push_batch(
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
RETURNS queen.pushed_batch
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
    n CONSTANT integer := coalesce(cardinality(push_batch.payloads), 0);
    names text[] := coalesce(push_batch.partitions, '{Default}');
    ranks smallint[] := coalesce(push_batch.priorities, '{0}');
    ids text[] := push_batch.transaction_ids;
    made_up CONSTANT boolean := ids IS NULL OR array_position(ids, NULL) IS NOT NULL;
    spread boolean;
    queue queen.queues;
    lane_ids bigint[]; -- the one lane, or of each message
    huge boolean := FALSE;
    repeated boolean := FALSE;
    -- One partition and nothing repeated: seqs run on from here, at one time ...
    tail_seq bigint;
    pushed_at timestamptz;
    fresh bigint := n;
    -- ... else of each message: whether it is new, and where it is; of a duplicate, where the first one is.
    is_new boolean[];
    seqs bigint[];
    home_lanes bigint[];
    stamps timestamptz[];
    salts smallint[];
    one_trace CONSTANT uuid := CASE WHEN cardinality(push_batch.trace_ids) = 1 THEN push_batch.trace_ids[1] END;
    created boolean := FALSE;
    depth_before bigint;
    woken integer;
BEGIN
    IF n = 0 THEN
        RETURN NULL;
    END IF;
    IF
        cardinality(names) NOT IN (1, n) OR cardinality(ranks) NOT IN (1, n)
        OR cardinality(ids) <> n OR cardinality(trace_ids) NOT IN (1, n)
    THEN
        PERFORM queen.raise_invalid(format('%s payloads need as many partitions, transaction ids, trace ids and priorities', n));
    END IF;
    spread := cardinality(names) > 1 OR cardinality(ranks) > 1;
    IF cardinality(names) > many_partitions AND (SELECT count(DISTINCT x) FROM unnest(names) AS x) > many_partitions THEN
        PERFORM pg_advisory_xact_lock(queen.queue_lock(push_batch.queue_name));
        huge := TRUE;
    ELSE
        PERFORM pg_advisory_xact_lock_shared(queen.queue_lock(push_batch.queue_name));
    END IF;

    SELECT q.* INTO queue FROM queen.queues AS q WHERE q.name = push_batch.queue_name;
    IF NOT FOUND THEN
        PERFORM queen.raise_unknown_queue(push_batch.queue_name);
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- Our snapshot may be older than the locks. Locking a row that was changed or deleted since is refused, 40001.
        PERFORM 1 FROM queen.queues AS q WHERE q.id = queue.id FOR KEY SHARE;
        IF queue.max_queue_size > 0 THEN
            PERFORM queen.raise_invalid(format(
                'queue %L has a max_queue_size, which is counted in read committed, not in %s', queue.name,
                current_setting('transaction_isolation')
            ));
        END IF;
    END IF;
    IF queue.encryption_enabled <> push_batch.is_encrypted AND push_batch.requeued_from IS NULL THEN
        RAISE EXCEPTION USING
            ERRCODE = 'QN005',
            MESSAGE = format(
                'queue %L %s; the push says the opposite', queue.name,
                CASE WHEN queue.encryption_enabled THEN 'takes encrypted payloads only' ELSE 'is not encrypted' END
            );
    END IF;
    -- One by one only where something may be wrong, or where there is more than one partition: a pass over a thousand
    -- messages is a sixth of their push. Ids are looked at on their way into the table.
    IF
        spread OR array_position(payloads, NULL) IS NOT NULL OR pg_column_size(payloads) > queue.max_message_bytes
        OR length(names[1]) NOT BETWEEN 1 AND 255 OR ranks[1] NOT BETWEEN 0 AND 9
    THEN
        PERFORM queen.check_push(queue, payloads, names, ids, ranks);
    END IF;

    IF NOT spread THEN
        SELECT ARRAY[l.id] INTO lane_ids
        FROM queen.lanes AS l
        WHERE l.queue_id = queue.id AND l.name = names[1] AND l.priority = ranks[1];
    END IF;
    IF lane_ids IS NULL THEN
        spread := n > 1;
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
    ELSIF NOT huge THEN
        PERFORM pg_advisory_xact_lock(queen.partition_lock(p.id))
        FROM (SELECT DISTINCT x.id / 10 AS id FROM unnest(lane_ids) AS x (id) ORDER BY 1) AS p;
    END IF;

    IF queue.max_queue_size > 0 THEN
        depth_before := queen.largest_backlog(queue.id);
    END IF;

    -- From here on messages are read: after the locks, in snapshots that see all earlier pushes to these partitions.
    -- First all of them are taken for new; the unique index on transaction ids knows better.
    pushed_at := clock_timestamp();
    repeated := ids[1] IS NOT NULL AND EXISTS (
        SELECT 1 FROM queen.message_log AS m
        WHERE
            int8xor(hashtextextended(m.transaction_id, m.lane_id / 10), coalesce(m.id_salt, 0)::bigint)
            = hashtextextended(ids[1], lane_ids[1] / 10)
    );
    LOOP
        IF repeated THEN
            -- With the ids as they were given: a message without one repeats nothing.
            ids := coalesce(push_batch.transaction_ids, array_fill(NULL::text, ARRAY[n]));
            SELECT d.* INTO is_new, seqs, home_lanes, stamps, ids, salts
            FROM queen.place_messages(lane_ids, ids, pushed_at) AS d;
            fresh := coalesce(cardinality(array_positions(is_new, TRUE)), 0);
        ELSIF spread THEN
            SELECT d.seqs, d.stamps INTO seqs, stamps FROM queen.next_places(lane_ids, pushed_at) AS d;
            home_lanes := lane_ids;
        ELSE
            SELECT t.seq, greatest(pushed_at, t.created_at) INTO tail_seq, pushed_at
            FROM queen.tail_of(lane_ids[1]) AS t;
        END IF;
        IF ids IS NULL OR array_position(ids, NULL) IS NOT NULL THEN
            -- A message without an id of the producer's has its own, as text. (Should somebody have used that one
            -- already, the index says so, and the next round makes up another.)
            ids := ARRAY(
                SELECT coalesce(
                    x.id,
                    queen.message_id(coalesce(x.lane_id, lane_ids[1]), coalesce(x.seq, tail_seq + x.position))::text
                )
                FROM unnest(ids, home_lanes, seqs, push_batch.payloads)
                    WITH ORDINALITY AS x (id, lane_id, seq, payload, position)
                ORDER BY x.position
            );
        END IF;
        BEGIN
            INSERT INTO queen.message_log (
                lane_id, seq, created_at, trace_id, is_encrypted, transaction_id, payload, requeued_from,
                origin_transaction_id, id_salt
            )
            SELECT
                coalesce(u.lane_id, lane_ids[1]),
                coalesce(u.seq, tail_seq + u.position),
                coalesce(u.stamp, pushed_at),
                coalesce(u.trace_id, one_trace),
                push_batch.is_encrypted,
                CASE WHEN octet_length(u.id) BETWEEN 1 AND 255 THEN u.id ELSE queen.checked_id(u.id) END,
                u.payload::json,
                u.requeued_from,
                u.origin_id,
                u.salt
            FROM unnest(
                home_lanes, seqs, stamps, push_batch.trace_ids, ids, push_batch.payloads, is_new, push_batch.requeued_from,
                push_batch.origin_transaction_ids, salts
            ) WITH ORDINALITY
                AS u (lane_id, seq, stamp, trace_id, id, payload, is_new, requeued_from, origin_id, salt, position)
            WHERE u.is_new IS NOT FALSE;
            EXIT;
        EXCEPTION
            WHEN unique_violation THEN
                -- A second time only where our snapshot is older than the lock: repeatable read and above.
                IF repeated THEN
                    RAISE EXCEPTION USING
                        ERRCODE = 'serialization_failure', MESSAGE = 'messages were pushed since this transaction began';
                END IF;
                repeated := TRUE;
        END;
    END LOOP;

    IF queue.max_queue_size > 0 AND fresh > 0 AND depth_before + fresh > queue.max_queue_size THEN
        RAISE EXCEPTION USING
            ERRCODE = 'QN002',
            MESSAGE = format(
                'queue %L holds %s of at most %s messages; %s more do not fit, nothing was stored',
                queue.name, depth_before, queue.max_queue_size, fresh
            );
    END IF;

    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- What our snapshot shows as ready may have been called drained since: the same refusal.
        PERFORM 1 FROM queen.consumers AS c WHERE c.lane_id = ANY (lane_ids) ORDER BY c.id + 0 FOR UPDATE;
    END IF;
    -- Drained groups of these lanes have messages again. Rows that are not drained are not touched.
    UPDATE queen.consumers AS c
    SET ready_at = pushed_at + make_interval(secs => queue.delayed_processing)
    WHERE c.id = ANY (ARRAY(
        SELECT d.id
        FROM queen.consumers AS d
        WHERE d.lane_id = ANY (lane_ids) AND d.ready_at IS NULL
        ORDER BY d.id + 0
        FOR UPDATE
    ));
    GET DIAGNOSTICS woken = ROW_COUNT;
    -- The only moments worth a NOTIFY, which makes commits wait for each other.
    IF woken > 0 OR created THEN
        PERFORM pg_notify('queen_ready', queue.name);
    END IF;

    RETURN (
        coalesce(home_lanes, lane_ids), tail_seq + 1, seqs, is_new, CASE WHEN made_up THEN ids END
    )::queen.pushed_batch;
END
$$;

-- The same with a row for each message, in input order: queued, or duplicate with the first one's id and seq.
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
AS $$
DECLARE
    pushed CONSTANT queen.pushed_batch := queen.push_batch(
        push.queue_name, push.payloads, push.partitions, push.transaction_ids, push.trace_ids, push.priorities,
        push.is_encrypted, push.origin_transaction_ids, push.requeued_from
    );
    one_partition CONSTANT text := CASE WHEN cardinality(push.partitions) = 1 THEN push.partitions[1] END;
BEGIN
    RETURN QUERY
    SELECT
        CASE WHEN u.is_new IS NOT FALSE THEN 'queued' ELSE 'duplicate' END,
        queen.message_id(coalesce(u.lane_id, pushed.lane_ids[1]), coalesce(u.seq, pushed.first_seq + u.position - 1)),
        coalesce(u.made_up_id, u.id),
        coalesce(u.name, one_partition, 'Default'),
        coalesce(u.seq, pushed.first_seq + u.position - 1),
        (coalesce(u.lane_id, pushed.lane_ids[1]) % 10)::smallint
    FROM unnest(
        push.payloads, pushed.lane_ids, pushed.seqs, pushed.is_new, pushed.transaction_ids, push.transaction_ids,
        push.partitions
    ) WITH ORDINALITY AS u (payload, lane_id, seq, is_new, made_up_id, id, name, position);
END
$$;
