-- Retention with an archive: what may go, is it the same in the archive, delete what is archived.

-- One job of a kind at a time, as long as the caller's session lives. Not through a pooler that shares sessions.
CREATE OR REPLACE FUNCTION queen.lock_job(job text)
RETURNS TABLE (locked boolean)
LANGUAGE sql VOLATILE
AS $$
    SELECT pg_try_advisory_lock(hashtextextended(job, 5817410277391022105));
$$;

-- What retention may delete at this moment, a row per lane. created_at tells a lane from one of the same id in another
-- database, or in this one before it was created anew.
CREATE OR REPLACE FUNCTION queen.deletable_ranges(queue_filter text)
RETURNS TABLE (
    lane_id bigint,
    lane_created_at timestamptz,
    queue_name text,
    partition_name text,
    priority smallint,
    retention_type text,
    first_seq bigint,
    last_seq bigint
)
LANGUAGE sql STABLE
AS $$
    SELECT
        l.id,
        l.created_at,
        q.name,
        l.name,
        l.priority,
        may.retention_type,
        l.floor_seq + 1,
        may.last_seq
    FROM queen.queues AS q
    INNER JOIN queen.lanes AS l ON l.queue_id = q.id
    CROSS JOIN LATERAL queen.deletable_through(q, l) AS may
    WHERE
        q.retention_enabled
        AND (queue_filter IS NULL OR q.name = queue_filter)
        AND may.last_seq > l.floor_seq
    ORDER BY q.name, l.name, l.priority;
$$;

-- Count and checksum of some ranges, as airflow_provider_queen.spark.archive computes them from a file: the sum of the
-- first 60 bits of each message's MD5. A sum does not ask for an order, so that both sides may read as they like.
CREATE OR REPLACE FUNCTION queen.range_checksums(lane_ids bigint[], first_seqs bigint[], last_seqs bigint[])
RETURNS TABLE (lane_id bigint, messages bigint, checksum text)
LANGUAGE sql STABLE
AS $$
    SELECT
        m.lane_id,
        count(*),
        sum(('x' || left(md5(concat_ws(
            chr(31),
            m.lane_id,
            m.seq,
            (extract(EPOCH FROM m.created_at) * 1000000)::bigint,
            m.transaction_id,
            coalesce(m.trace_id, ''),
            coalesce(m.origin_transaction_id, ''),
            coalesce(m.requeued_from, ''),
            m.is_encrypted::int,
            m.payload
        )), 15))::bit(60)::bigint)::text
    FROM queen.scan_messages(lane_ids, first_seqs, last_seqs) AS m
    GROUP BY m.lane_id;
$$;

-- Deletes at most max_rows messages, none beyond the given seqs: the caller has them in an archive. Whether they may go
-- is decided again, under the locks that queen.retain takes too; a lane in use at this moment waits for the next call.
CREATE OR REPLACE FUNCTION queen.delete_archived(archived_lanes bigint[], archived_seqs bigint[], max_rows integer)
RETURNS TABLE (lane_id bigint, deleted bigint)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
#variable_conflict use_column
DECLARE
    target record;
    queue queen.queues;
    lane queen.lanes;
    may record;
    removed bigint;
    budget bigint := delete_archived.max_rows;
BEGIN
    -- The locks only help where the statements after them see what was committed meanwhile.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM queen.raise_invalid(
            format('retention decides in read committed, not in %s', current_setting('transaction_isolation'))
        );
    END IF;
    FOR target IN
        SELECT a.lane_id, a.last_seq
        FROM unnest(delete_archived.archived_lanes, delete_archived.archived_seqs) AS a (lane_id, last_seq)
        INNER JOIN queen.lanes AS l ON l.id = a.lane_id AND l.floor_seq < a.last_seq
        ORDER BY a.lane_id
    LOOP
        EXIT WHEN budget <= 0;
        SELECT l.* INTO lane FROM queen.lanes AS l WHERE l.id = target.lane_id FOR NO KEY UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND OR NOT queen.lock_consumers(lane.id);
        SELECT q.* INTO queue FROM queen.queues AS q WHERE q.id = lane.queue_id;
        SELECT * INTO may FROM queen.deletable_through(queue, lane);
        removed := queen.delete_prefix(
            queue, lane, least(may.last_seq, target.last_seq, lane.floor_seq + budget), may.retention_type
        );
        CONTINUE WHEN removed = 0;
        budget := budget - removed;
        delete_archived.lane_id := lane.id;
        delete_archived.deleted := removed;
        RETURN NEXT;
    END LOOP;
END
$$;
