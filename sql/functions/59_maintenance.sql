-- Jobs: leases that ran out, messages that waited too long, messages that need not be kept. Each call is bounded; call
-- again until it returns nothing. None is needed for correctness: a pop does the first two for the lanes it meets.

CREATE OR REPLACE FUNCTION queen.reclaim(queue_name text DEFAULT NULL, max_rows integer DEFAULT 1000)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
#variable_conflict use_column
DECLARE
    qid CONSTANT integer := CASE WHEN reclaim.queue_name IS NOT NULL THEN queen.queue_id_of(reclaim.queue_name) END;
    consumer queen.consumers;
    state queen.consumer_states;
    reclaimed bigint := 0;
BEGIN
    FOR consumer IN
        SELECT c.*
        FROM queen.consumers AS c
        CROSS JOIN LATERAL (
            SELECT s.lease_expires_at FROM queen.consumer_states AS s
            WHERE s.consumer_id = c.id ORDER BY s.gen DESC LIMIT 1
        ) AS s
        WHERE
            c.ready_at IS NOT NULL AND s.lease_expires_at <= clock_timestamp()
            AND (qid IS NULL OR c.queue_id = qid)
        LIMIT reclaim.max_rows
        FOR UPDATE OF c SKIP LOCKED
    LOOP
        state := queen.state_of(consumer); -- again, now that the row is locked
        IF state.lease_expires_at <= clock_timestamp() THEN
            PERFORM queen.expire_lease(consumer, state);
            UPDATE queen.consumers AS c SET ready_at = clock_timestamp() WHERE c.id = consumer.id;
            reclaimed := reclaimed + 1;
        END IF;
    END LOOP;
    RETURN reclaimed;
END
$$;

-- Messages over max_wait_time_seconds go to the dead letters, once per group that has them pending.
-- A lane with a live lease is left to its holder; afterwards the next pop or run evicts.
CREATE OR REPLACE FUNCTION queen.evict(queue_name text DEFAULT NULL, max_rows integer DEFAULT 10000)
RETURNS SETOF queen.eviction
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
#variable_conflict use_column
DECLARE
    qid CONSTANT integer := CASE WHEN evict.queue_name IS NOT NULL THEN queen.queue_id_of(evict.queue_name) END;
    target record;
    consumer queen.consumers;
    state queen.consumer_states;
    older_than timestamptz;
    floor_seq bigint;
    evicted bigint;
    total bigint;
    budget bigint := evict.max_rows;
BEGIN
    FOR target IN
        SELECT q AS queue, q.id, q.name, q.max_wait_time_seconds, g.consumer_group
        FROM queen.queues AS q
        CROSS JOIN LATERAL queen.groups_of(q) AS g (consumer_group)
        WHERE q.max_wait_time_seconds > 0 AND (qid IS NULL OR q.id = qid)
        ORDER BY q.id, g.consumer_group
    LOOP
        total := 0;
        older_than := clock_timestamp() - make_interval(secs => target.max_wait_time_seconds);
        PERFORM queen.discover_again(target.consumer_group, target.id);
        FOR consumer IN
            SELECT c.* FROM queen.consumers AS c
            WHERE c.queue_id = target.id AND c.consumer_group = target.consumer_group AND c.ready_at IS NOT NULL
            ORDER BY c.id
            FOR UPDATE SKIP LOCKED
        LOOP
            EXIT WHEN budget <= 0;
            state := queen.state_of(consumer);
            CONTINUE WHEN state.lease_expires_at > clock_timestamp();
            IF state.lease_id IS NOT NULL THEN
                PERFORM queen.expire_lease(consumer, state);
                state := queen.state_of(consumer);
            END IF;
            SELECT l.floor_seq INTO floor_seq FROM queen.lanes AS l WHERE l.id = consumer.lane_id;
            evicted := queen.evict_lane(
                consumer, state, queen.fold(greatest(state.cursor, floor_seq), state.ahead), older_than, budget
            );
            budget := budget - evicted;
            total := total + evicted;
        END LOOP;
        IF total > 0 THEN
            RETURN NEXT (target.name, target.consumer_group, total)::queen.eviction;
        END IF;
    END LOOP;
END
$$;

-- What a job needs of queen.discover: the group exists, its subscription too.
CREATE OR REPLACE FUNCTION queen.discover_again(consumer_group text, queue_id integer)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM queen.discover(
        s.consumer_group, ARRAY[discover_again.queue_id], s.queue_name, NULL, s.namespace, s.task, s.subscription_mode,
        s.subscription_timestamp, clock_timestamp()
    )
    FROM queen.queues AS q
    CROSS JOIN LATERAL queen.subscription_of(discover_again.consumer_group, q, NULL) AS s
    WHERE q.id = discover_again.queue_id AND s.consumer_group IS NOT NULL;
END
$$;

-- The last seq of a lane that retention may delete, and under which rule; nothing is changed.
--   retention   older than retention_seconds, consumed or not, but nothing that a live lease holds
--   completed   older than completed_retention_seconds and settled by every group that exists, one at least
CREATE OR REPLACE FUNCTION queen.deletable_through(
    queue queen.queues, lane queen.lanes, OUT last_seq bigint, OUT retention_type text
)
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
#variable_conflict use_column
DECLARE
    now_at CONSTANT timestamptz := clock_timestamp();
    settled_through bigint;
    old_through bigint;
    held_from bigint;
BEGIN
    last_seq := lane.floor_seq;
    IF NOT queue.retention_enabled THEN
        RETURN;
    END IF;
    SELECT
        min(CASE WHEN c.id IS NULL THEN lane.floor_seq ELSE queen.fold(greatest(s.cursor, lane.floor_seq), s.ahead) END),
        min(CASE WHEN s.lease_expires_at > now_at THEN lower(s.held) END)
    INTO settled_through, held_from
    FROM queen.groups_of(queue) AS g (consumer_group)
    LEFT JOIN queen.consumers AS c ON c.lane_id = lane.id AND c.consumer_group = g.consumer_group
    LEFT JOIN LATERAL (
        SELECT
            coalesce(n.cursor, c.start_seq) AS cursor, coalesce(n.ahead, '{}') AS ahead,
            coalesce(n.held, '{}') AS held, n.lease_expires_at
        FROM (SELECT 1) AS one
        LEFT JOIN LATERAL (
            SELECT r.* FROM queen.consumer_states AS r WHERE r.consumer_id = c.id ORDER BY r.gen DESC LIMIT 1
        ) AS n ON TRUE
    ) AS s ON TRUE;
    IF queue.completed_retention_seconds > 0 AND settled_through > last_seq THEN
        last_seq := greatest(last_seq, least(
            settled_through,
            queen.seq_before(lane.id, now_at - make_interval(secs => queue.completed_retention_seconds))
        ));
        retention_type := 'completed';
    END IF;
    IF queue.retention_seconds > 0 THEN
        old_through := queen.seq_before(lane.id, now_at - make_interval(secs => queue.retention_seconds));
        old_through := least(old_through, coalesce(held_from - 1, old_through));
        IF old_through > last_seq THEN
            last_seq := old_through;
            retention_type := 'retention';
        END IF;
    END IF;
END
$$;

-- Deletes the prefix of one lane up to a seq, and raises its floor with it. The caller has locked the lane and its
-- consumers (queen.lock_consumers) and decided that it may.
CREATE OR REPLACE FUNCTION queen.delete_prefix(
    queue queen.queues, lane queen.lanes, last_seq bigint, retention_type text
)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
DECLARE
    last_at timestamptz;
    deleted bigint;
    consumer queen.consumers;
    state queen.consumer_states;
    new_state queen.consumer_states;
BEGIN
    SELECT m.created_at INTO last_at FROM queen.message_log AS m
    WHERE m.lane_id = lane.id AND m.seq = delete_prefix.last_seq;
    UPDATE queen.lanes AS l
    SET floor_seq = delete_prefix.last_seq, floor_created_at = coalesce(last_at, l.floor_created_at)
    WHERE l.id = lane.id AND l.floor_seq < delete_prefix.last_seq;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    DELETE FROM queen.message_log AS m WHERE m.lane_id = lane.id AND m.seq <= delete_prefix.last_seq;
    GET DIAGNOSTICS deleted = ROW_COUNT;
    FOR consumer IN
        SELECT c.* FROM queen.consumers AS c
        WHERE
            c.lane_id = lane.id
            AND EXISTS (
                SELECT 1 FROM queen.redeliveries AS r WHERE r.consumer_id = c.id AND r.seq <= delete_prefix.last_seq
            )
    LOOP
        state := queen.state_of(consumer);
        new_state := state;
        new_state.redelivering := state.redelivering
            - queen.forget_failures(consumer.id, int8multirange(int8range(NULL, delete_prefix.last_seq, '[]')));
        PERFORM queen.replace_state(state, new_state);
    END LOOP;
    INSERT INTO queen.retention_history (
        queue_name, partition_name, lane_id, retention_type, messages_deleted, first_seq, last_seq
    )
    VALUES (
        queue.name, lane.name, lane.id, delete_prefix.retention_type, deleted, lane.floor_seq + 1,
        delete_prefix.last_seq
    );
    RETURN deleted;
END
$$;

-- Retention in plain SQL, for small installations: deletes at most max_rows messages.
--   retain | pop      the rows of the lane's consumers are locked while we decide and delete; where somebody works on
--                     one right now, the lane waits for the next run. A cursor that the floor has passed counts as the
--                     floor.
--   retain | push     dedupe sees a message or not, both are right. The lane's last seq is the floor when no row is
--                     left: rows and floor change in one transaction, and a push reads both in one snapshot.
--   retain | discover the lane's row: one of the two leaves the lane for later.
--   retain | retain   the lane's row.
CREATE OR REPLACE FUNCTION queen.retain(queue_name text DEFAULT NULL, max_rows integer DEFAULT 10000)
RETURNS SETOF queen.retained_partition
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
#variable_conflict use_column
DECLARE
    qid CONSTANT integer := CASE WHEN retain.queue_name IS NOT NULL THEN queen.queue_id_of(retain.queue_name) END;
    queue queen.queues;
    lane queen.lanes;
    may record;
    deleted bigint;
    budget bigint := retain.max_rows;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        PERFORM queen.raise_invalid(
            format('retention decides in read committed, not in %s', current_setting('transaction_isolation'))
        );
    END IF;
    FOR queue IN
        SELECT q.* FROM queen.queues AS q WHERE q.retention_enabled AND (qid IS NULL OR q.id = qid) ORDER BY q.id
    LOOP
        FOR lane IN
            SELECT l.* FROM queen.lanes AS l
            WHERE
                l.queue_id = queue.id
                AND EXISTS (SELECT 1 FROM queen.message_log AS m WHERE m.lane_id = l.id)
            ORDER BY l.id
            FOR NO KEY UPDATE SKIP LOCKED
        LOOP
            EXIT WHEN budget <= 0;
            CONTINUE WHEN NOT queen.lock_consumers(lane.id);
            SELECT * INTO may FROM queen.deletable_through(queue, lane);
            CONTINUE WHEN may.last_seq <= lane.floor_seq;
            deleted := queen.delete_prefix(
                queue, lane, least(may.last_seq, lane.floor_seq + budget), may.retention_type
            );
            budget := budget - deleted;
            RETURN NEXT (queue.name, lane.name, may.retention_type, deleted)::queen.retained_partition;
        END LOOP;
    END LOOP;
END
$$;

-- Locks all consumers of a lane without waiting; false where one of them is in use.
CREATE OR REPLACE FUNCTION queen.lock_consumers(lane_id bigint)
RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
DECLARE
    locked bigint;
BEGIN
    SELECT count(*) INTO locked
    FROM (
        SELECT c.id FROM queen.consumers AS c WHERE c.lane_id = lock_consumers.lane_id ORDER BY c.id + 0
        FOR UPDATE SKIP LOCKED
    ) AS l;
    RETURN locked = (SELECT count(*) FROM queen.consumers AS c WHERE c.lane_id = lock_consumers.lane_id);
END
$$;
