-- Upgrade from v2, first part: copy messages into tables of the present shape, in the schema queen_next, while
-- producers and consumers go on with v2. Nothing of v2 is changed but for three triggers on queen.messages.
--
-- How nothing is lost that v2's producers write meanwhile:
--   The triggers note each message that is inserted or deleted, in the producer's own transaction. Creating them waits
--   for every transaction that has written to queen.messages before, so the notes are complete from the first copy on.
--   A note is visible when its message is. queen_v2.take_changes takes each note once:
--     inserted, beyond what is copied      the copy comes to it by itself
--     inserted, copied already             nothing to do
--     inserted, before the last one copied its transaction committed late: the partition is rewound to there
--     deleted, copied                      seqs would have a gap: the partition is rewound to there
--   The last notes are taken under a lock that no producer passes (cutover.sql). Who waits for that lock finds v2's
--   table gone when it gets it, and fails: a producer always learns whether its message is stored.
-- Lock order of the cutover: the consumers' tables, then queen.messages, queen.partitions, queen.queues; a producer
-- takes the latter in the same order. v2's retention goes from messages to messages_status: such a circle PostgreSQL
-- breaks with 40P01, and the runner repeats the cutover with stop.sql before it, which begins with queen.messages.

CREATE TABLE queen_v2.changes (
    partition_id uuid,
    message_id uuid NOT NULL,
    created_at timestamptz,
    is_deleted boolean NOT NULL
);

-- What v2 itself says is pending, for the comparison in verify.sql.
CREATE TABLE queen_v2.expected_pending (
    lane_id bigint NOT NULL,
    consumer_group text NOT NULL,
    through_seq bigint NOT NULL,
    pending bigint NOT NULL,
    PRIMARY KEY (lane_id, consumer_group)
);

-- The producers' roles need no right on our tables.
CREATE FUNCTION queen_v2.note_changes()
RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF tg_op IN ('DELETE', 'UPDATE') THEN
        INSERT INTO queen_v2.changes SELECT o.partition_id, o.id, o.created_at, TRUE FROM old_rows AS o;
    END IF;
    IF tg_op IN ('INSERT', 'UPDATE') THEN
        INSERT INTO queen_v2.changes SELECT n.partition_id, n.id, n.created_at, FALSE FROM new_rows AS n;
    END IF;
    RETURN NULL;
END
$$;

-- Queues and partitions that are not mapped yet.
CREATE FUNCTION queen_v2.copy_partitions()
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    WITH added AS (
        INSERT INTO queen_next.queues (name, created_at)
        SELECT q.name, coalesce(q.created_at, now())
        FROM queen.queues AS q
        WHERE NOT EXISTS (SELECT 1 FROM queen_v2.queue_map AS m WHERE m.v2_id = q.id)
        ORDER BY q.created_at, q.id
        RETURNING id, name
    )
    INSERT INTO queen_v2.queue_map (v2_id, id)
    SELECT q.id, a.id FROM added AS a INNER JOIN queen.queues AS q ON q.name = a.name;

    WITH added AS (
        INSERT INTO queen_next.partitions (queue_id, name, created_at)
        SELECT m.id, p.name, coalesce(p.created_at, now())
        FROM queen.partitions AS p
        INNER JOIN queen_v2.queue_map AS m ON m.v2_id = p.queue_id
        WHERE NOT EXISTS (SELECT 1 FROM queen_v2.partition_map AS x WHERE x.v2_id = p.id)
        ORDER BY m.id, p.created_at, p.id
        RETURNING id, queue_id, name, created_at
    ),

    lanes AS (
        INSERT INTO queen_next.lanes (id, queue_id, priority, name, created_at)
        SELECT a.id * 10, a.queue_id, 0, a.name, a.created_at FROM added AS a
    )

    INSERT INTO queen_v2.partition_map (v2_id, id, is_rewound)
    SELECT p.id, a.id, TRUE
    FROM added AS a
    INNER JOIN queen_v2.queue_map AS m ON m.id = a.queue_id
    INNER JOIN queen.partitions AS p ON p.queue_id = m.v2_id AND p.name = a.name;
END
$$;

-- Forgets the copies from a place on.
CREATE FUNCTION queen_v2.rewind(partition queen_v2.partition_map, from_created_at timestamptz, from_id uuid)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    first_gone bigint;
BEGIN
    SELECT min(m.seq) INTO first_gone
    FROM queen_v2.message_map AS m
    INNER JOIN queen_next.message_log AS l ON l.lane_id = m.lane_id AND l.seq = m.seq
    WHERE m.lane_id = partition.id * 10 AND (l.created_at, m.v2_id) >= (from_created_at, from_id);
    IF first_gone IS NULL THEN
        RETURN;
    END IF;
    DELETE FROM queen_v2.message_map AS m WHERE m.lane_id = partition.id * 10 AND m.seq >= first_gone;
    DELETE FROM queen_next.message_log AS l WHERE l.lane_id = partition.id * 10 AND l.seq >= first_gone;
    UPDATE queen_v2.partition_map AS p
    SET
        (last_created_at, last_id) = (
            SELECT l.created_at, m.v2_id
            FROM queen_v2.message_map AS m
            INNER JOIN queen_next.message_log AS l ON l.lane_id = m.lane_id AND l.seq = m.seq
            WHERE m.lane_id = partition.id * 10 AND m.seq = first_gone - 1
        ),
        copied = first_gone - 1,
        verified = 0,
        checksum = 0,
        is_rewound = TRUE
    WHERE p.id = partition.id;
END
$$;

-- Takes the notes that are there, each once; see the head of this file.
CREATE FUNCTION queen_v2.take_changes()
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    late record;
BEGIN
    FOR late IN
        WITH taken AS (
            DELETE FROM queen_v2.changes RETURNING *
        )

        SELECT DISTINCT ON (p.id) p AS partition, t.created_at, t.message_id
        FROM taken AS t
        INNER JOIN queen_v2.partition_map AS p ON p.v2_id = t.partition_id
        LEFT JOIN queen_v2.message_map AS m ON m.v2_id = t.message_id
        WHERE
            CASE
                WHEN t.is_deleted THEN m.v2_id IS NOT NULL
                ELSE m.v2_id IS NULL AND (t.created_at, t.message_id) <= (p.last_created_at, p.last_id)
            END
        ORDER BY p.id, t.created_at, t.message_id
    LOOP
        PERFORM queen_v2.rewind(late.partition, late.created_at, late.message_id);
    END LOOP;
END
$$;

-- The next messages of a partition, in v2's order, under the next seqs; then what was written is read back and
-- compared.
CREATE FUNCTION queen_v2.copy_chunk(partition_id uuid, chunk integer)
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    target queen_v2.partition_map;
    added integer;
    through record;
    source record;
    written record;
BEGIN
    SELECT p.* INTO target FROM queen_v2.partition_map AS p WHERE p.v2_id = copy_chunk.partition_id;
    WITH source AS (
        SELECT s.*, target.copied + row_number() OVER (ORDER BY s.created_at, s.id) AS seq
        FROM (
            SELECT m.* FROM queen.messages AS m
            WHERE
                m.partition_id = copy_chunk.partition_id
                AND (target.last_id IS NULL OR (m.created_at, m.id) > (target.last_created_at, target.last_id))
            ORDER BY m.created_at, m.id
            LIMIT chunk
        ) AS s
    ),

    mapped AS (
        INSERT INTO queen_v2.message_map (v2_id, lane_id, seq)
        SELECT s.id, target.id * 10, s.seq FROM source AS s
    )

    INSERT INTO queen_next.message_log (lane_id, seq, created_at, trace_id, is_encrypted, transaction_id, payload)
    SELECT
        target.id * 10, s.seq, s.created_at, s.trace_id, coalesce(s.is_encrypted, FALSE), s.transaction_id,
        s.payload::text::json
    FROM source AS s;
    GET DIAGNOSTICS added = ROW_COUNT;
    IF added = 0 AND target.verified = target.copied THEN
        RETURN 0;
    END IF;

    SELECT l.created_at, m.v2_id INTO through
    FROM queen_v2.message_map AS m
    INNER JOIN queen_next.message_log AS l ON l.lane_id = m.lane_id AND l.seq = m.seq
    WHERE m.lane_id = target.id * 10 AND m.seq = target.copied + added;
    SELECT count(*) AS messages, coalesce(sum(hashtextextended(concat_ws(
        chr(31), v.transaction_id, v.trace_id, v.created_at, v.payload::text
    ), 0)::numeric), 0) AS checksum
    INTO source
    FROM queen_v2.message_map AS m
    INNER JOIN queen.messages AS v ON v.id = m.v2_id
    WHERE m.lane_id = target.id * 10 AND m.seq > target.verified AND m.seq <= target.copied + added;
    SELECT count(*) AS messages, coalesce(sum(hashtextextended(concat_ws(
        chr(31), l.transaction_id, l.trace_id, l.created_at, l.payload::text
    ), 0)::numeric), 0) AS checksum
    INTO written
    FROM queen_next.message_log AS l
    WHERE l.lane_id = target.id * 10 AND l.seq > target.verified AND l.seq <= target.copied + added;
    IF source.checksum <> written.checksum AND source.messages = written.messages THEN
        RAISE EXCEPTION 'the copies of partition % differ from the originals', copy_chunk.partition_id;
    END IF;
    UPDATE queen_v2.partition_map AS p
    SET
        last_created_at = through.created_at,
        last_id = through.v2_id,
        copied = target.copied + added,
        -- Of one that was deleted since it was copied the note is on its way; then all is read again.
        verified = CASE WHEN source.messages = written.messages THEN target.copied + added ELSE p.verified END,
        checksum = p.checksum + CASE WHEN source.messages = written.messages THEN written.checksum ELSE 0 END
    WHERE p.id = target.id;
    RETURN added;
END
$$;

-- All that is there, a chunk a transaction; ends when hardly anything came meanwhile. To be called outside a
-- transaction; killed and called again it goes on where it was.
CREATE PROCEDURE queen_v2.copy(chunk integer)
LANGUAGE plpgsql
AS $$
DECLARE
    about CONSTANT bigint := (
        SELECT greatest(c.reltuples, 0)::bigint FROM pg_catalog.pg_class AS c WHERE c.oid = 'queen.messages'::regclass
    );
    partition_id uuid;
    added integer;
    in_pass bigint;
    uncommitted bigint := 0;
    total bigint := (SELECT coalesce(sum(p.copied), 0) FROM queen_v2.partition_map AS p);
BEGIN
    FOR pass IN 1..100 LOOP
        PERFORM queen_v2.copy_partitions();
        PERFORM queen_v2.take_changes();
        COMMIT;
        in_pass := 0;
        FOR partition_id IN SELECT p.v2_id FROM queen_v2.partition_map AS p ORDER BY p.id LOOP
            LOOP
                added := queen_v2.copy_chunk(partition_id, chunk);
                in_pass := in_pass + added;
                uncommitted := uncommitted + added;
                IF uncommitted >= chunk THEN
                    COMMIT;
                    total := total + uncommitted;
                    uncommitted := 0;
                    RAISE NOTICE 'copied % messages of about %', total, greatest(about, total);
                END IF;
                EXIT WHEN added < chunk;
            END LOOP;
        END LOOP;
        EXIT WHEN in_pass < chunk;
    END LOOP;
    COMMIT;
    RAISE NOTICE 'copied % messages, of which % in the last pass', total + uncommitted, in_pass;
END
$$;

CREATE TRIGGER queen_v2_inserted AFTER INSERT ON queen.messages
REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION queen_v2.note_changes();
CREATE TRIGGER queen_v2_deleted AFTER DELETE ON queen.messages
REFERENCING OLD TABLE AS old_rows FOR EACH STATEMENT EXECUTE FUNCTION queen_v2.note_changes();
CREATE TRIGGER queen_v2_updated AFTER UPDATE ON queen.messages
REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION queen_v2.note_changes();
