-- Pop: find ready lanes, look what each has, lease, read.

-- Copies messages to the dead letters for one group. The caller moves the cursor past them.
CREATE OR REPLACE FUNCTION queen.bury(
    consumer queen.consumers, seqs int8multirange, reason text, error text
)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
DECLARE
    buried bigint;
BEGIN
    INSERT INTO queen.dead_letter_queue (
        queue_id, lane_id, seq, message_id, consumer_group, partition_name, priority, transaction_id,
        origin_transaction_id, trace_id, payload, is_encrypted, reason, error_message, retry_count,
        original_created_at, failed_at
    )
    SELECT
        l.queue_id, l.id, m.seq, queen.message_id(l.id, m.seq), consumer.consumer_group, l.name, l.priority,
        m.transaction_id, m.origin_transaction_id, m.trace_id, m.payload, m.is_encrypted, bury.reason,
        coalesce(bury.error, again.error_message),
        -- The failure that ends it is counted already, and is no redelivery.
        greatest(coalesce(again.failures, 0) - CASE WHEN bury.reason IN ('failed', 'expired') THEN 1 ELSE 0 END, 0),
        m.created_at, clock_timestamp()
    FROM queen.lanes AS l
    CROSS JOIN unnest(bury.seqs) AS r (seqs)
    CROSS JOIN LATERAL (
        SELECT x.* FROM queen.message_log AS x
        WHERE x.lane_id = l.id AND x.seq >= lower(r.seqs) AND x.seq < upper(r.seqs)
        ORDER BY x.seq
    ) AS m
    LEFT JOIN LATERAL (
        SELECT d.failures, d.error_message FROM queen.redeliveries AS d
        WHERE d.consumer_id = consumer.id AND d.seq = m.seq
    ) AS again ON TRUE
    WHERE l.id = consumer.lane_id;
    GET DIAGNOSTICS buried = ROW_COUNT;
    RETURN buried;
END
$$;

-- Counts one more failure for each message and says which of them have used up their retries, and how often the most
-- tried of the others has failed.
CREATE OR REPLACE FUNCTION queen.count_failures(
    consumer_id bigint, seqs int8multirange, retry_limit integer, error text,
    OUT exhausted int8multirange, OUT most_failures integer, OUT added integer
)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
#variable_conflict use_column
BEGIN
    WITH counted AS (
        INSERT INTO queen.redeliveries AS r (consumer_id, seq, failures, error_message)
        SELECT count_failures.consumer_id, s.seq, 1, left(count_failures.error, 10000)
        FROM unnest(count_failures.seqs) AS x (seqs)
        CROSS JOIN generate_series(lower(x.seqs), upper(x.seqs) - 1) AS s (seq)
        ON CONFLICT (consumer_id, seq) DO UPDATE
            SET failures = r.failures + 1, error_message = coalesce(excluded.error_message, r.error_message)
        RETURNING r.seq, r.failures, r.failures = 1 AS is_first
    )
    SELECT
        coalesce(
            range_agg(int8range(c.seq, c.seq, '[]')) FILTER (WHERE c.failures > count_failures.retry_limit), '{}'
        ),
        coalesce(max(c.failures) FILTER (WHERE c.failures <= count_failures.retry_limit), 0),
        count(*) FILTER (WHERE c.is_first)
    INTO exhausted, most_failures, added
    FROM counted AS c;
END
$$;

-- Forgets the failures of messages that are settled; returns how many it had remembered.
CREATE OR REPLACE FUNCTION queen.forget_failures(consumer_id bigint, seqs int8multirange)
RETURNS integer
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
DECLARE
    forgotten integer;
BEGIN
    DELETE FROM queen.redeliveries AS r
    WHERE r.consumer_id = forget_failures.consumer_id AND forget_failures.seqs @> r.seq;
    GET DIAGNOSTICS forgotten = ROW_COUNT;
    RETURN forgotten;
END
$$;

-- Ends a lease that has run out. The caller holds the consumer's row lock and has read the state after locking it.
-- Every message that it held has failed once more. Of several, nobody knows which one killed the consumer: they come
-- again one at a time, and a message is given up only when it was alone in its lease.
CREATE OR REPLACE FUNCTION queen.expire_lease(consumer queen.consumers, state queen.consumer_states)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    now_at CONSTANT timestamptz := clock_timestamp();
    -- What retention has removed meanwhile cannot come again.
    held CONSTANT int8multirange := queen.beyond(
        (SELECT l.floor_seq FROM queen.lanes AS l WHERE l.id = consumer.lane_id), state.held
    );
    next_state queen.consumer_states := state;
    queue queen.queues;
    failures record;
BEGIN
    SELECT q.* INTO queue FROM queen.queues AS q WHERE q.id = consumer.queue_id;
    SELECT * INTO failures FROM queen.count_failures(
        consumer.id, held, queue.retry_limit, format('the lease of attempt %s ran out', state.attempt)
    );
    next_state.redelivering := state.redelivering + failures.added;
    IF queen.size(state.held) = 1 AND NOT isempty(failures.exhausted) THEN
        IF queue.dlq_after_max_retries THEN
            PERFORM queen.bury(consumer, failures.exhausted, 'expired', NULL);
        ELSE
            next_state.total_dropped := state.total_dropped + 1;
        END IF;
        next_state.redelivering := next_state.redelivering
            - queen.forget_failures(consumer.id, failures.exhausted);
        next_state.ahead := state.ahead + failures.exhausted;
        next_state.cursor := queen.fold(state.cursor, next_state.ahead);
        next_state.ahead := queen.beyond(next_state.cursor, next_state.ahead);
    END IF;
    next_state.suspect_through := greatest(state.suspect_through, upper(held) - 1);
    INSERT INTO queen.deliveries (
        lane_id, first_seq, last_seq, popped_at, ended_at, completed, failed, rejected, released, expired, attempt,
        priority, queue_name, partition_name, consumer_group
    )
    SELECT
        l.id, state.first_seq, state.last_seq, state.popped_at, now_at, state.completed, state.failed,
        state.rejected, state.released, queen.size(state.held), state.attempt, l.priority, queue.name, l.name,
        consumer.consumer_group
    FROM queen.lanes AS l WHERE l.id = consumer.lane_id;
    PERFORM queen.replace_state(state, queen.without_lease(next_state));
END
$$;

CREATE OR REPLACE FUNCTION queen.without_lease(state queen.consumer_states)
RETURNS queen.consumer_states
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    state.lease_id := NULL;
    state.lease_expires_at := NULL;
    state.popped_at := NULL;
    state.first_seq := NULL;
    state.last_seq := NULL;
    state.held := '{}';
    state.attempt := 0;
    state.completed := 0;
    state.failed := 0;
    state.rejected := 0;
    state.released := 0;
    RETURN state;
END
$$;

-- The next generations of consumers, each in place of the one before it. Two transactions that start from the same one
-- collide on the primary key: in repeatable read and above, as 40001; below that the consumer's row lock comes first.
CREATE OR REPLACE FUNCTION queen.add_states(new_states queen.consumer_states[])
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    INSERT INTO queen.consumer_states SELECT n.* FROM unnest(new_states) AS n
    ON CONFLICT (consumer_id, gen) DO NOTHING;
    -- By address: what the row lock on the consumer protects moves nowhere between the look-up and the delete.
    DELETE FROM queen.consumer_states AS s
    WHERE s.ctid = ANY (ARRAY(
        SELECT o.ctid
        FROM unnest(new_states) AS n
        CROSS JOIN LATERAL (
            SELECT r.ctid FROM queen.consumer_states AS r
            WHERE r.consumer_id = n.consumer_id AND r.gen = n.gen - 1
            LIMIT 1
        ) AS o
    ));
END
$$;

CREATE OR REPLACE FUNCTION queen.replace_state(old_state queen.consumer_states, new_state queen.consumer_states)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
BEGIN
    new_state.gen := old_state.gen + 1;
    PERFORM queen.add_states(ARRAY[new_state]);
END
$$;

-- The newest state of a consumer; for one that was never popped, generation 0 at its start.
CREATE OR REPLACE FUNCTION queen.state_of(consumer queen.consumers)
RETURNS queen.consumer_states
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
DECLARE
    state queen.consumer_states;
BEGIN
    SELECT s.* INTO state FROM queen.consumer_states AS s
    WHERE s.consumer_id = consumer.id ORDER BY s.gen DESC LIMIT 1;
    IF NOT FOUND THEN
        state := queen.first_state(consumer);
    END IF;
    RETURN state;
END
$$;

CREATE OR REPLACE FUNCTION queen.first_state(consumer queen.consumers)
RETURNS queen.consumer_states
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    state queen.consumer_states;
BEGIN
    state.consumer_id := consumer.id;
    state.gen := 0;
    state.cursor := consumer.start_seq;
    state.suspect_through := 0;
    state.total_completed := 0;
    state.total_dropped := 0;
    state.redelivering := 0;
    state.ahead := '{}';
    RETURN queen.without_lease(state);
END
$$;

-- Moves messages that waited too long to the dead letters, as far as they are the lane's next ones.
-- The caller holds the consumer's row lock, and no lease is live.
CREATE OR REPLACE FUNCTION queen.evict_lane(
    consumer queen.consumers, state queen.consumer_states, from_seq bigint, older_than timestamptz, max_rows bigint
)
RETURNS bigint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    head_at timestamptz;
    last_seq bigint;
    stale int8multirange;
    next_state queen.consumer_states := state;
    evicted bigint;
BEGIN
    SELECT m.created_at INTO head_at FROM queen.message_log AS m
    WHERE m.lane_id = consumer.lane_id AND m.seq = from_seq + 1;
    IF head_at IS NULL OR head_at >= older_than THEN
        RETURN 0;
    END IF;
    last_seq := least(
        queen.seq_before(consumer.lane_id, older_than), queen.seq_after(from_seq, state.ahead, max_rows)
    );
    stale := queen.span(from_seq + 1, last_seq) - state.ahead;
    evicted := queen.bury(consumer, stale, 'evicted', 'waited longer than max_wait_time_seconds');
    next_state.redelivering := state.redelivering - queen.forget_failures(consumer.id, stale);
    next_state.ahead := state.ahead + stale;
    next_state.cursor := queen.fold(from_seq, next_state.ahead);
    next_state.ahead := queen.beyond(next_state.cursor, next_state.ahead);
    PERFORM queen.replace_state(state, next_state);
    INSERT INTO queen.retention_history (
        queue_name, partition_name, lane_id, retention_type, messages_deleted, first_seq, last_seq
    )
    SELECT q.name, l.name, l.id, 'evicted', evicted, from_seq + 1, last_seq
    FROM queen.lanes AS l INNER JOIN queen.queues AS q ON q.id = l.queue_id
    WHERE l.id = consumer.lane_id AND evicted > 0;
    RETURN evicted;
END
$$;

-- Whether nothing is pending and no push can be under way that would not see ready_at NULL.
-- Under the partition's lock no push is. It is only tried for: a push that holds it is about to commit messages.
-- After some partitions in one call the queue's own lock is tried instead, which stands for all: locks are a scarce
-- good, and a new group may find a hundred thousand empty partitions.
-- False means: leave the lane as it is, the next pop looks again.
CREATE OR REPLACE FUNCTION queen.is_drained(
    queue_name text, lane_id bigint, from_seq bigint, ahead int8multirange, drained_before integer
)
RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    last_seq bigint;
BEGIN
    IF drained_before < 64 OR NOT pg_try_advisory_xact_lock(queen.queue_lock(is_drained.queue_name)) THEN
        IF
            drained_before >= 1000
            OR NOT pg_try_advisory_xact_lock_shared(queen.queue_lock(is_drained.queue_name))
            OR NOT pg_try_advisory_xact_lock(queen.partition_lock(is_drained.lane_id / 10))
        THEN
            RETURN FALSE;
        END IF;
    END IF;
    -- A new statement, after the lock: it sees whatever was pushed.
    SELECT m.seq INTO last_seq FROM queen.message_log AS m
    WHERE m.lane_id = is_drained.lane_id ORDER BY m.seq DESC LIMIT 1;
    RETURN last_seq IS NULL OR last_seq - from_seq - queen.size(queen.beyond(from_seq, ahead)) <= 0;
END
$$;

-- Whether a group has a row for every lane of a queue, as far as anybody can see.
CREATE OR REPLACE FUNCTION queen.knows_lanes(known queen.queue_groups)
RETURNS boolean
LANGUAGE sql STABLE
AS $$
    SELECT
        known.discovered_xid IS NOT NULL
        AND known.discovered_xid <= pg_snapshot_xmax(pg_current_snapshot()) -- of another cluster, after a restore: no
        AND NOT EXISTS (
            SELECT 1 FROM queen.lanes AS l
            WHERE l.queue_id = known.queue_id AND l.created_xid >= known.discovered_xid
        );
$$;

-- Leases the next messages of up to max_partitions ready lanes, batch_size in all, and returns them in order.
--
-- A lane is claimed by its row in consumers, FOR UPDATE SKIP LOCKED; what it has is read by later statements, whose
-- snapshots see whatever the previous holder of that row lock committed.
--   pop | pop                 the second skips the row, or sees the first one's lease and puts ready_at at its expiry.
--   pop | settle              settle waits for the row, or pop skips it. A lease that ran out is whose who comes first.
--   pop | push                no common lock, but for calling a lane drained: see queen.drained_until.
--   pop | seek, retention     as settle: they lock the row.
-- in_transaction says that the caller's transaction goes on: then no lane is called drained, for that holds the
-- partition's lock, and producers would wait for the transaction's end.
-- In repeatable read and above both may read the same state; the primary key of consumer_states lets one commit, the
-- other gets 40001. There nothing is parked either: what we see of a lane may be over.
CREATE OR REPLACE FUNCTION queen.pop(
    queue_name text DEFAULT NULL,
    partition text DEFAULT NULL,
    consumer_group text DEFAULT NULL,
    batch_size integer DEFAULT 100,
    max_partitions integer DEFAULT 1,
    lease_seconds integer DEFAULT NULL,
    subscription_mode text DEFAULT 'all',
    subscription_from timestamptz DEFAULT NULL,
    auto_ack boolean DEFAULT FALSE,
    namespace text DEFAULT NULL,
    task text DEFAULT NULL,
    in_transaction boolean DEFAULT FALSE
)
RETURNS SETOF queen.popped_message
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = OFF
SET enable_bitmapscan = OFF
SET enable_hashjoin = OFF
SET enable_mergejoin = OFF
SET jit = OFF
AS $$
#variable_conflict use_column
DECLARE
    now_at CONSTANT timestamptz := clock_timestamp();
    may_park CONSTANT boolean := current_setting('transaction_isolation') = 'read committed';
    may_drain CONSTANT boolean := may_park AND NOT pop.in_transaction;
    evict_rows CONSTANT integer := 10000;
    reader CONSTANT text := coalesce(pop.consumer_group, '__QUEUE_MODE__');
    queue_ids integer[];
    ranks smallint[];
    is_known boolean;
    claim_queues integer[];
    claim_ranks smallint[];
    wanted integer := pop.max_partitions;
    claim_size integer := pop.max_partitions;
    budget bigint := pop.batch_size;
    claimed bigint[];
    again bigint[];
    changed boolean;
    lane record;
    from_seq bigint;
    end_seq bigint;
    available bigint;
    take bigint;
    until timestamptz;
    parked bigint[];
    parked_until timestamptz[];
    drained integer := 0;
    done_with bigint[] := '{}'; -- not to be claimed again by this call
    -- What is leased, an element a lane.
    new_states queen.consumer_states[];
    lane_ids bigint[];
    queue_names text[];
    lane_names text[];
    from_seqs bigint[];
    last_seqs bigint[];
    skips int8multirange[];
    lease_ids uuid[];
    expiries timestamptz[];
    forget_ids bigint[];
    forget int8multirange[];
    retried bigint[]; -- the consumer, where a message of its lease comes again
    new_state queen.consumer_states;
    span int8multirange;
BEGIN
    IF pop.batch_size < 1 OR pop.max_partitions < 1 OR pop.lease_seconds < 1 THEN
        PERFORM queen.raise_invalid(format(
            'batch_size, max_partitions and lease_seconds are at least 1, not %s, %s, %s',
            pop.batch_size, pop.max_partitions, coalesce(pop.lease_seconds::text, 'NULL')
        ));
    ELSIF (pop.queue_name IS NULL) = (pop.namespace IS NULL AND pop.task IS NULL) THEN
        PERFORM queen.raise_invalid('a pop names a queue, or a namespace and/or a task, and not both');
    ELSIF pop.partition IS NOT NULL AND pop.queue_name IS NULL THEN
        PERFORM queen.raise_invalid('a partition is popped by naming its queue too');
    ELSIF coalesce(pop.subscription_mode, '') NOT IN ('all', 'new', 'timestamp') THEN
        PERFORM queen.raise_invalid(format(
            'unknown subscription mode %L; the nearest is %L', pop.subscription_mode,
            queen.nearest(coalesce(pop.subscription_mode, ''), '{all,new,timestamp}')
        ));
    ELSIF (pop.subscription_mode = 'timestamp') <> (pop.subscription_from IS NOT NULL) THEN
        PERFORM queen.raise_invalid('subscription_from goes with the subscription mode timestamp, and that needs it');
    END IF;
    IF length(reader) NOT BETWEEN 1 AND 255 OR length(pop.partition) NOT BETWEEN 1 AND 255 THEN
        PERFORM queen.check_name('consumer group', reader);
        PERFORM queen.check_name('partition name', pop.partition);
    END IF;

    -- The queues, and whether the group has been here before and knows every lane of theirs.
    IF pop.queue_name IS NULL THEN
        SELECT
            coalesce(array_agg(q.id ORDER BY q.priority DESC, q.name), '{}'),
            EXISTS (
                SELECT 1 FROM queen.consumer_groups_metadata AS s
                WHERE
                    s.consumer_group = reader
                    AND coalesce(s.queue_name, '') = ''
                    AND coalesce(s.partition_name, '') = ''
                    AND coalesce(s.namespace, '') = coalesce(pop.namespace, '')
                    AND coalesce(s.task, '') = coalesce(pop.task, '')
            ) AND coalesce(bool_and(queen.knows_lanes(x.known)), TRUE)
        INTO queue_ids, is_known
        FROM queen.queues AS q
        LEFT JOIN LATERAL (
            SELECT r AS known FROM queen.queue_groups AS r
            WHERE r.queue_id = q.id AND r.consumer_group = reader LIMIT 1
        ) AS x ON TRUE
        WHERE
            (pop.namespace IS NULL OR q.namespace = pop.namespace)
            AND (pop.task IS NULL OR q.task = pop.task);
    ELSE
        SELECT
            ARRAY[q.id],
            g.priorities,
            CASE
                -- As queen.knows_lanes, without the price of a call.
                WHEN pop.partition IS NULL
                    THEN
                        g.is_subscribed
                        AND g.discovered_xid <= pg_snapshot_xmax(pg_current_snapshot())
                        AND NOT EXISTS (
                            SELECT 1 FROM queen.lanes AS l
                            WHERE l.queue_id = q.id AND l.created_xid >= g.discovered_xid
                        )
                ELSE EXISTS (
                    SELECT 1 FROM queen.consumer_groups_metadata AS s
                    WHERE
                        s.consumer_group = reader
                        AND coalesce(s.queue_name, '') = pop.queue_name
                        AND coalesce(s.partition_name, '') = pop.partition
                        AND coalesce(s.namespace, '') = ''
                        AND coalesce(s.task, '') = ''
                )
                AND NOT EXISTS (
                    SELECT 1 FROM queen.lanes AS l
                    WHERE
                        l.queue_id = q.id AND l.name = pop.partition
                        AND (
                            SELECT c.id FROM queen.consumers AS c
                            WHERE c.lane_id = l.id AND c.consumer_group = reader
                            LIMIT 1
                        ) IS NULL
                )
            END,
            first.claimed
        INTO queue_ids, ranks, is_known, claimed
        FROM queen.queues AS q
        LEFT JOIN LATERAL (
            SELECT r.priorities, r.discovered_xid, r.is_subscribed FROM queen.queue_groups AS r
            WHERE r.queue_id = q.id AND r.consumer_group = reader LIMIT 1
        ) AS g ON TRUE
        -- The first claim of the loop below: with it, a pop of an idle queue is one statement.
        LEFT JOIN LATERAL (
            SELECT array_agg(k.id) AS claimed
            FROM (
                SELECT c.id
                FROM unnest(g.priorities) AS o (priority)
                CROSS JOIN LATERAL (
                    SELECT r.id
                    FROM queen.consumers AS r
                    WHERE
                        r.queue_id = q.id AND r.consumer_group = reader AND r.priority = o.priority
                        AND r.ready_at <= now_at AND pop.partition IS NULL
                    ORDER BY r.ready_at
                    LIMIT wanted
                    FOR UPDATE SKIP LOCKED
                ) AS c
                LIMIT wanted
            ) AS k
        ) AS first ON TRUE
        WHERE q.name = pop.queue_name;
        IF NOT FOUND THEN
            PERFORM queen.raise_unknown_queue(pop.queue_name);
        END IF;
    END IF;
    IF is_known IS NOT TRUE THEN
        PERFORM queen.discover(
            reader, queue_ids, pop.queue_name, pop.partition, pop.namespace, pop.task, pop.subscription_mode,
            pop.subscription_from, now_at
        );
        ranks := NULL;
        claimed := NULL;
    ELSIF pop.queue_name IS NOT NULL AND pop.partition IS NULL AND claimed IS NULL THEN
        RETURN;
    END IF;
    -- Where to look: queues by their priority, and in each the message priorities that there are.
    IF ranks IS NOT NULL THEN
        claim_queues := array_fill(queue_ids[1], ARRAY[cardinality(ranks)]);
        claim_ranks := ranks;
    ELSE
        SELECT array_agg(x.id ORDER BY x.position, p.rank DESC), array_agg(p.rank ORDER BY x.position, p.rank DESC)
        INTO claim_queues, claim_ranks
        FROM unnest(queue_ids) WITH ORDINALITY AS x (id, position)
        CROSS JOIN LATERAL (
            SELECT g.priorities FROM queen.queue_groups AS g
            WHERE g.queue_id = x.id AND g.consumer_group = reader LIMIT 1
        ) AS g
        CROSS JOIN LATERAL unnest(g.priorities) AS p (rank);
    END IF;

    WHILE wanted > 0 AND budget > 0 LOOP
        -- Claim: queues by their priority, messages by theirs, then the lane that has waited longest.
        IF claimed IS NOT NULL THEN
            NULL; -- by the first statement
        ELSIF pop.partition IS NULL THEN
            SELECT array_agg(k.id) INTO claimed
            FROM (
                SELECT c.id
                FROM unnest(claim_queues, claim_ranks) AS o (queue_id, priority)
                CROSS JOIN LATERAL (
                    SELECT r.id
                    FROM queen.consumers AS r
                    WHERE
                        r.queue_id = o.queue_id AND r.consumer_group = reader AND r.priority = o.priority
                        AND r.ready_at <= now_at AND r.id <> ALL (done_with)
                    ORDER BY r.ready_at
                    LIMIT claim_size
                    FOR UPDATE SKIP LOCKED
                ) AS c
                LIMIT claim_size
            ) AS k;
        ELSE
            SELECT array_agg(k.id) INTO claimed
            FROM (
                SELECT c.id
                FROM (
                    SELECT l.id FROM queen.lanes AS l
                    WHERE l.queue_id = queue_ids[1] AND l.name = pop.partition
                    ORDER BY l.priority DESC
                ) AS o
                CROSS JOIN LATERAL (
                    SELECT r.id FROM queen.consumers AS r
                    WHERE
                        r.lane_id = o.id AND r.consumer_group = reader AND r.ready_at <= now_at
                        AND r.id <> ALL (done_with)
                    FOR UPDATE SKIP LOCKED
                ) AS c
                LIMIT wanted
            ) AS k;
        END IF;
        EXIT WHEN claimed IS NULL;
        parked := '{}';
        parked_until := '{}';
        again := claimed;

        WHILE cardinality(again) > 0 LOOP
            changed := FALSE;
            -- A new statement: it sees what the last holder of each row committed.
            FOR lane IN
                SELECT
                    c.consumer, s.state, l.floor_seq, l.name, c.id, c.lane_id,
                    t.seq AS tail_seq, t.created_at AS tail_at,
                    q.name AS queue_name, q.lease_time, q.window_buffer, q.delayed_processing, q.max_wait_time_seconds
                FROM unnest(again) WITH ORDINALITY AS x (id, position)
                CROSS JOIN LATERAL (
                    SELECT r AS consumer, r.id, r.lane_id, r.queue_id FROM queen.consumers AS r
                    WHERE r.id = x.id LIMIT 1
                ) AS c
                CROSS JOIN LATERAL (
                    SELECT r.name, r.floor_seq FROM queen.lanes AS r WHERE r.id = c.lane_id LIMIT 1
                ) AS l
                CROSS JOIN LATERAL (SELECT r.* FROM queen.queues AS r WHERE r.id = c.queue_id LIMIT 1) AS q
                LEFT JOIN LATERAL (
                    SELECT r AS state FROM queen.consumer_states AS r
                    WHERE r.consumer_id = c.id ORDER BY r.gen DESC LIMIT 1
                ) AS s ON TRUE
                LEFT JOIN LATERAL (
                    SELECT m.seq, m.created_at FROM queen.message_log AS m
                    WHERE m.lane_id = c.lane_id ORDER BY m.seq DESC LIMIT 1
                ) AS t ON TRUE
                ORDER BY x.position
            LOOP
                new_state := lane.state;
                IF new_state.gen IS NULL THEN
                    new_state := queen.first_state(lane.consumer);
                    lane.state := new_state;
                END IF;
                IF new_state.lease_id IS NOT NULL THEN
                    IF new_state.lease_expires_at > now_at THEN
                        parked := parked || lane.id;
                        parked_until := parked_until || new_state.lease_expires_at;
                    ELSE
                        PERFORM queen.expire_lease(lane.consumer, new_state);
                        again := again || lane.id;
                        changed := TRUE;
                    END IF;
                    CONTINUE;
                ELSIF new_state.retry_at > now_at THEN
                    parked := parked || lane.id;
                    parked_until := parked_until || new_state.retry_at;
                    CONTINUE;
                END IF;

                from_seq := queen.fold(greatest(new_state.cursor, lane.floor_seq), new_state.ahead);
                new_state.ahead := queen.beyond(from_seq, new_state.ahead);
                end_seq := lane.tail_seq;
                available := end_seq - from_seq - queen.size(new_state.ahead);
                IF available IS NULL OR available <= 0 THEN
                    IF
                        may_drain
                        AND queen.is_drained(lane.queue_name, lane.lane_id, from_seq, new_state.ahead, drained)
                    THEN
                        drained := drained + 1;
                        parked := parked || lane.id;
                        parked_until := array_append(parked_until, NULL);
                    ELSE
                        done_with := done_with || lane.id;
                    END IF;
                    CONTINUE;
                END IF;
                IF lane.window_buffer > 0 AND lane.tail_at + make_interval(secs => lane.window_buffer) > now_at THEN
                    parked := parked || lane.id;
                    parked_until := parked_until || (lane.tail_at + make_interval(secs => lane.window_buffer));
                    CONTINUE;
                END IF;
                IF
                    lane.max_wait_time_seconds > 0
                    AND queen.evict_lane(
                        lane.consumer, lane.state, from_seq,
                        now_at - make_interval(secs => lane.max_wait_time_seconds), evict_rows
                    ) > 0
                THEN
                    again := again || lane.id;
                    changed := TRUE;
                    CONTINUE;
                END IF;
                IF lane.delayed_processing > 0 AND lane.tail_at + make_interval(secs => lane.delayed_processing) > now_at THEN
                    -- Not all are due. Times rise with seqs, so those that are come first.
                    end_seq := queen.seq_before(
                        lane.lane_id, now_at - make_interval(secs => lane.delayed_processing) + interval '1 microsecond'
                    );
                    available := end_seq - from_seq - queen.size(
                        new_state.ahead * int8multirange(int8range(NULL, end_seq, '[]'))
                    );
                    IF available <= 0 THEN
                        SELECT m.created_at + make_interval(secs => lane.delayed_processing) INTO until
                        FROM queen.message_log AS m
                        WHERE m.lane_id = lane.lane_id AND m.seq = from_seq + 1;
                        parked := parked || lane.id;
                        parked_until := parked_until || coalesce(until, now_at + interval '1 second');
                        CONTINUE;
                    END IF;
                END IF;

                CONTINUE WHEN budget <= 0 OR wanted <= 0;
                IF changed THEN
                    -- A lane before this one has to be read again first: the order of the claim is that of priority.
                    again := again || lane.id;
                    CONTINUE;
                END IF;
                take := least(available, budget);
                IF new_state.suspect_through > from_seq THEN
                    take := 1;
                END IF;
                end_seq := queen.seq_after(from_seq, new_state.ahead, take);
                span := queen.span(from_seq + 1, end_seq) - new_state.ahead;
                budget := budget - take;
                wanted := wanted - 1;
                done_with := done_with || lane.id;
                lane_ids := lane_ids || lane.lane_id;
                queue_names := queue_names || lane.queue_name;
                lane_names := lane_names || lane.name;
                from_seqs := from_seqs || from_seq;
                last_seqs := last_seqs || end_seq;
                skips := array_append(skips, new_state.ahead);
                new_state.gen := new_state.gen + 1;
                new_state.cursor := from_seq;
                new_state.retry_at := NULL;
                new_state.first_seq := lower(span);
                new_state.last_seq := end_seq;
                new_state.popped_at := now_at;
                new_state.attempt := 1;
                IF new_state.redelivering > 0 THEN
                    -- Retention may have passed messages that had failed.
                    new_state.redelivering := new_state.redelivering
                        - queen.forget_failures(lane.id, int8multirange(int8range(NULL, from_seq, '[]')));
                    SELECT coalesce(max(r.failures), 0) + 1 INTO new_state.attempt
                    FROM queen.redeliveries AS r
                    WHERE r.consumer_id = new_state.consumer_id AND span @> r.seq;
                END IF;
                IF pop.auto_ack THEN
                    IF new_state.redelivering > 0 THEN
                        -- Deleted at the very end: the attempts are still to be read.
                        new_state.redelivering := new_state.redelivering - (
                            SELECT count(*) FROM queen.redeliveries AS r
                            WHERE r.consumer_id = new_state.consumer_id AND span @> r.seq
                        );
                        forget := array_append(forget, span);
                        forget_ids := forget_ids || lane.id;
                    END IF;
                    new_state.completed := take;
                    new_state.total_completed := new_state.total_completed + take;
                    new_state.settled_at := now_at;
                    new_state.ahead := new_state.ahead + span;
                    new_state.cursor := queen.fold(from_seq, new_state.ahead);
                    new_state.ahead := queen.beyond(new_state.cursor, new_state.ahead);
                ELSE
                    new_state.held := span;
                    new_state.lease_id := queen.new_lease_id(new_state.consumer_id);
                    new_state.lease_expires_at := now_at
                        + make_interval(secs => coalesce(pop.lease_seconds, lane.lease_time));
                END IF;
                new_states := array_append(new_states, new_state);
                lease_ids := array_append(lease_ids, new_state.lease_id);
                expiries := array_append(expiries, new_state.lease_expires_at);
                retried := array_append(retried, CASE WHEN new_state.attempt > 1 THEN lane.id END);
            END LOOP;
            again := again[cardinality(claimed) + 1:];
            claimed := again;
        END LOOP;
        claimed := NULL;

        -- Many lanes that looked ready and are not (a new group on many empty partitions): fewer and larger rounds.
        claim_size := least(claim_size * 2, 1000);
        IF NOT may_park THEN
            done_with := done_with || parked;
        ELSIF cardinality(parked) > 0 THEN
            UPDATE queen.consumers AS c
            SET ready_at = parked_until[array_position(parked, c.id)]
            WHERE c.id = ANY (parked);
        END IF;
    END LOOP;

    IF new_states IS NULL THEN
        RETURN;
    END IF;
    IF pop.auto_ack THEN
        INSERT INTO queen.deliveries (
            lane_id, first_seq, last_seq, popped_at, ended_at, completed, failed, rejected, released, expired, attempt,
            priority, queue_name, partition_name, consumer_group
        )
        SELECT
            s.lane_id, s.first_seq, s.last_seq, now_at, now_at, s.completed, 0, 0, 0, 0, s.attempt, s.lane_id % 10,
            s.queue_name, s.lane_name, reader
        FROM ROWS FROM (unnest(lane_ids), unnest(queue_names), unnest(lane_names), unnest(new_states))
            AS s (lane_id, queue_name, lane_name);
        SELECT array_agg(queen.without_lease(s)) INTO new_states FROM unnest(new_states) AS s;
    END IF;
    PERFORM queen.add_states(new_states);

    -- Others wait for their turn: these lanes go to the end of the line.
    IF
        pop.partition IS NULL
        AND EXISTS (
            SELECT 1
            FROM unnest(claim_queues, claim_ranks) AS o (queue_id, priority)
            CROSS JOIN LATERAL (
                SELECT r.id FROM queen.consumers AS r
                WHERE
                    r.queue_id = o.queue_id AND r.consumer_group = reader AND r.priority = o.priority
                    AND r.ready_at <= now_at AND r.id <> ALL (done_with)
                LIMIT 1
            ) AS other
        )
    THEN
        UPDATE queen.consumers AS c SET ready_at = clock_timestamp()
        WHERE c.id = ANY (ARRAY(SELECT s.consumer_id FROM unnest(new_states) AS s));
    END IF;

    RETURN QUERY
    SELECT
        (lpad(to_hex(x.lane_id), 12, '0') || '80008' || lpad(to_hex(m.seq), 15, '0'))::uuid,
        m.transaction_id,
        m.trace_id,
        x.queue_name,
        x.lane_name,
        (x.lane_id % 10)::smallint,
        m.seq,
        m.payload,
        m.is_encrypted,
        m.origin_transaction_id,
        m.created_at,
        CASE
            WHEN x.retried IS NULL THEN 1
            ELSE 1 + coalesce(
                (
                    SELECT r.failures FROM queen.redeliveries AS r
                    WHERE r.consumer_id = x.retried AND r.seq = m.seq
                ),
                0
            )
        END,
        x.lease_id,
        x.lease_expires_at,
        reader
    FROM unnest(
        lane_ids, queue_names, lane_names, from_seqs, last_seqs, skips, lease_ids, expiries, retried
    ) AS x (lane_id, queue_name, lane_name, from_seq, last_seq, skip, lease_id, lease_expires_at, retried)
    CROSS JOIN LATERAL (
        SELECT r.* FROM queen.message_log AS r
        WHERE r.lane_id = x.lane_id AND r.seq > x.from_seq AND r.seq <= x.last_seq AND NOT x.skip @> r.seq
        ORDER BY r.seq
    ) AS m;
    IF forget_ids IS NOT NULL THEN
        PERFORM queen.forget_failures(f.id, f.seqs) FROM unnest(forget_ids, forget) AS f (id, seqs);
    END IF;
END
$$;

-- When a pop that found nothing should look again, as far as anybody knows; NULL where nothing is pending.
CREATE OR REPLACE FUNCTION queen.next_ready_at(
    queue_name text DEFAULT NULL, partition text DEFAULT NULL, consumer_group text DEFAULT NULL,
    namespace text DEFAULT NULL, task text DEFAULT NULL
)
RETURNS timestamptz
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT min(c.ready_at)
    FROM queen.queues AS q
    CROSS JOIN generate_series(0, 9) AS p (priority)
    CROSS JOIN LATERAL (
        SELECT r.ready_at FROM queen.consumers AS r
        WHERE
            r.queue_id = q.id AND r.priority = p.priority
            AND r.consumer_group = coalesce(next_ready_at.consumer_group, '__QUEUE_MODE__')
            AND r.ready_at IS NOT NULL
            AND (
                next_ready_at.partition IS NULL
                OR r.lane_id IN (
                    SELECT l.id FROM queen.lanes AS l WHERE l.queue_id = q.id AND l.name = next_ready_at.partition
                )
            )
        ORDER BY r.ready_at
        LIMIT 1
    ) AS c
    WHERE
        (next_ready_at.queue_name IS NULL OR q.name = next_ready_at.queue_name)
        AND (next_ready_at.namespace IS NULL OR q.namespace = next_ready_at.namespace)
        AND (next_ready_at.task IS NULL OR q.task = next_ready_at.task);
$$;
