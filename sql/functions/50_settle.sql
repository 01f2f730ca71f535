-- Settle: end the delivery of leased messages. Renew: extend leases.

-- Ends deliveries of any number of leases, any mix of outcomes, all or nothing. Arrays have one element a lease.
--   completed   never delivered again
--   failed      delivered again after retry_delay * 2^(failures - 1), at most 5 minutes; after retry_limit redeliveries
--               to the dead letters, or dropped and counted where dlq_after_max_retries is false
--   rejected    straight to the dead letters
--   released    given back, no attempt counted
--
-- The consumers' rows are locked by ascending id; their states are read by a later statement:
--   settle | takeover     a pop that took over has replaced the lease: its token differs, QN003, nothing changed.
--                         If we come first, the pop skips the row.
--   settle | push         no common lock. We never call a lane drained, so no wake-up can get lost here.
--   settle twice          the second finds the messages no longer held: QN003.
CREATE OR REPLACE FUNCTION queen.settle(
    lease_ids uuid[],
    completed int8multirange[],
    failed int8multirange[] DEFAULT NULL,
    rejected int8multirange[] DEFAULT NULL,
    released int8multirange[] DEFAULT NULL,
    error text DEFAULT NULL
)
RETURNS SETOF queen.settlement
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
    none CONSTANT int8multirange := '{}';
    lease record;
    old_state queen.consumer_states;
    new_state queen.consumer_states;
    new_states queen.consumer_states[] := '{}';
    ended queen.deliveries[] := '{}';
    delivery queen.deliveries;
    given int8multirange;
    gone int8multirange;
    failures record;
    outcome queen.settlement;
    outcomes queen.settlement[] := '{}';
    wake bigint[] := '{}';
    wake_at timestamptz[] := '{}';
    wake_queues text[] := '{}';
    waking text;
BEGIN
    IF coalesce(cardinality(lease_ids), 0) = 0 THEN
        RETURN;
    ELSIF cardinality(lease_ids) > (SELECT count(DISTINCT x.id) FROM unnest(lease_ids) AS x (id)) THEN
        PERFORM queen.raise_invalid('a lease is named twice in one settlement');
    END IF;
    PERFORM 1 FROM queen.consumers AS c
    WHERE c.id = ANY (ARRAY(SELECT queen.lease_consumer(x.id) FROM unnest(lease_ids) AS x (id)))
    ORDER BY c.id
    FOR UPDATE;

    -- A new statement: it sees what was committed before we got the locks.
    FOR lease IN
        SELECT
            x.lease_id,
            coalesce(x.completed, none) AS completed,
            coalesce(x.failed, none) AS failed,
            coalesce(x.rejected, none) AS rejected,
            coalesce(x.released, none) AS released,
            c.consumer, c.ready_at, c.lane_id, c.id AS consumer_id, c.consumer_group,
            s.state, l.name, l.floor_seq, q.name AS queue_name, q.retry_limit, q.retry_delay, q.dlq_after_max_retries
        FROM unnest(lease_ids, completed, failed, rejected, released)
            AS x (lease_id, completed, failed, rejected, released)
        LEFT JOIN LATERAL (
            SELECT r AS consumer, r.* FROM queen.consumers AS r WHERE r.id = queen.lease_consumer(x.lease_id) LIMIT 1
        ) AS c ON TRUE
        LEFT JOIN LATERAL (
            SELECT r AS state FROM queen.consumer_states AS r
            WHERE r.consumer_id = c.id ORDER BY r.gen DESC LIMIT 1
        ) AS s ON TRUE
        LEFT JOIN LATERAL (SELECT r.name, r.floor_seq FROM queen.lanes AS r WHERE r.id = c.lane_id LIMIT 1) AS l ON TRUE
        LEFT JOIN LATERAL (SELECT r.* FROM queen.queues AS r WHERE r.id = c.queue_id LIMIT 1) AS q ON TRUE
    LOOP
        old_state := lease.state;
        IF lease.lease_id IS DISTINCT FROM old_state.lease_id OR old_state.lease_id IS NULL THEN
            RAISE EXCEPTION USING
                ERRCODE = 'QN003',
                MESSAGE = format(
                    'lease %s%s is over: it was settled, or it ran out and another consumer took over; nothing was changed',
                    lease.lease_id,
                    coalesce(
                        ' on partition ' || quote_literal(lease.name) || ' of queue ' || quote_literal(lease.queue_name), ''
                    )
                );
        END IF;
        given := lease.completed + lease.failed + lease.rejected + lease.released;
        IF NOT old_state.held @> given THEN
            RAISE EXCEPTION USING
                ERRCODE = 'QN003',
                MESSAGE = format(
                    'lease %s does not hold the messages %s of partition %L of queue %L (any more); nothing was changed',
                    lease.lease_id, given - old_state.held, lease.name, lease.queue_name
                );
        END IF;
        outcome := (lease.lease_id, queen.size(lease.completed), queen.size(lease.failed), 0, 0,
            queen.size(lease.released), 0)::queen.settlement;
        IF queen.size(given) <> outcome.completed + outcome.retried + outcome.released + queen.size(lease.rejected) THEN
            PERFORM queen.raise_invalid(format('lease %s: a message has two outcomes in one settlement', lease.lease_id));
        END IF;
        CONTINUE WHEN isempty(given);

        new_state := old_state;
        new_state.gen := old_state.gen + 1;
        gone := lease.completed + lease.rejected;
        IF NOT isempty(lease.failed) THEN
            new_state.failed := old_state.failed + outcome.retried;
            -- What retention has removed since the lease ran out cannot come again.
            lease.failed := queen.beyond(lease.floor_seq, lease.failed);
            outcome.retried := queen.size(lease.failed);
            SELECT * INTO failures FROM queen.count_failures(
                lease.consumer_id, lease.failed, lease.retry_limit, settle.error
            );
            new_state.redelivering := new_state.redelivering + failures.added;
            IF NOT isempty(failures.exhausted) THEN
                IF lease.dlq_after_max_retries THEN
                    outcome.dead_lettered := queen.bury(lease.consumer, failures.exhausted, 'failed', settle.error);
                ELSE
                    outcome.dropped := queen.size(failures.exhausted);
                    new_state.total_dropped := old_state.total_dropped + outcome.dropped;
                END IF;
                outcome.retried := outcome.retried - queen.size(failures.exhausted);
                gone := gone + failures.exhausted;
            END IF;
            IF outcome.retried > 0 THEN
                new_state.retry_at := greatest(
                    old_state.retry_at,
                    now_at + interval '1 millisecond' * least(
                        lease.retry_delay::float8 * power(2, least(failures.most_failures - 1, 30)), 300000
                    )
                );
            END IF;
        END IF;
        IF NOT isempty(lease.rejected) THEN
            outcome.dead_lettered := outcome.dead_lettered
                + queen.bury(lease.consumer, lease.rejected, 'rejected', settle.error);
            new_state.rejected := old_state.rejected + queen.size(lease.rejected);
        END IF;
        IF NOT isempty(gone) THEN
            IF new_state.redelivering > 0 THEN
                new_state.redelivering := new_state.redelivering - queen.forget_failures(lease.consumer_id, gone);
            END IF;
            new_state.ahead := old_state.ahead + gone;
            new_state.cursor := queen.fold(old_state.cursor, new_state.ahead);
            new_state.ahead := queen.beyond(new_state.cursor, new_state.ahead);
        END IF;
        new_state.completed := old_state.completed + outcome.completed;
        new_state.released := old_state.released + outcome.released;
        new_state.total_completed := old_state.total_completed + outcome.completed;
        new_state.settled_at := now_at;
        new_state.held := old_state.held - given;
        outcome.remaining := queen.size(new_state.held);
        outcomes := outcomes || outcome;

        IF isempty(new_state.held) THEN
            delivery.lane_id := lease.lane_id;
            delivery.first_seq := old_state.first_seq;
            delivery.last_seq := old_state.last_seq;
            delivery.popped_at := old_state.popped_at;
            delivery.completed := new_state.completed;
            delivery.failed := new_state.failed;
            delivery.rejected := new_state.rejected;
            delivery.released := new_state.released;
            delivery.attempt := old_state.attempt;
            delivery.queue_name := lease.queue_name;
            delivery.partition_name := lease.name;
            delivery.consumer_group := lease.consumer_group;
            ended := ended || delivery;
            new_state := queen.without_lease(new_state);
            -- ready_at stays as it is, unless somebody who ran into the lease moved it, or a retry has to wait.
            IF new_state.retry_at > now_at THEN
                wake := wake || lease.consumer_id;
                wake_at := wake_at || new_state.retry_at;
            ELSIF lease.ready_at IS NULL OR lease.ready_at > now_at THEN
                wake := wake || lease.consumer_id;
                wake_at := wake_at || now_at;
                wake_queues := wake_queues || lease.queue_name;
            END IF;
        END IF;
        new_states := new_states || new_state;
    END LOOP;

    PERFORM queen.add_states(new_states);
    IF cardinality(ended) > 0 THEN
        INSERT INTO queen.deliveries (
            lane_id, first_seq, last_seq, popped_at, ended_at, completed, failed, rejected, released, expired, attempt,
            priority, queue_name, partition_name, consumer_group
        )
        SELECT
            d.lane_id, d.first_seq, d.last_seq, d.popped_at, now_at, d.completed, d.failed, d.rejected, d.released, 0,
            d.attempt, d.lane_id % 10, d.queue_name, d.partition_name, d.consumer_group
        FROM unnest(ended) AS d;
    END IF;
    IF cardinality(wake) > 0 THEN
        UPDATE queen.consumers AS c
        SET ready_at = wake_at[array_position(wake, c.id)]
        WHERE c.id = ANY (wake);
        -- Whoever ran into one of these leases may be waiting for it.
        FOR waking IN SELECT DISTINCT w.name FROM unnest(wake_queues) AS w (name) LOOP
            PERFORM pg_notify('queen_ready', waking);
        END LOOP;
    END IF;
    RETURN QUERY SELECT o.* FROM unnest(outcomes) AS o;
END
$$;

-- The messages of one lease: those named, or all that it still holds.
CREATE OR REPLACE FUNCTION queen.lease_seqs(lease_id uuid, seqs bigint[])
RETURNS int8multirange
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    state queen.consumer_states;
BEGIN
    IF seqs IS NOT NULL THEN
        RETURN (SELECT coalesce(range_agg(int8range(s, s, '[]')), '{}') FROM unnest(seqs) AS s);
    END IF;
    SELECT s.* INTO state FROM queen.consumer_states AS s
    WHERE s.consumer_id = queen.lease_consumer(lease_seqs.lease_id) ORDER BY s.gen DESC LIMIT 1;
    -- Of a lease that is over: something that settle refuses.
    RETURN CASE WHEN state.lease_id = lease_seqs.lease_id THEN state.held ELSE '{[1,2)}' END;
END
$$;

-- One lease, one outcome, for whoever types SQL: the messages named by seq, or all that the lease still holds.
CREATE OR REPLACE FUNCTION queen.ack(lease_id uuid, seqs bigint[] DEFAULT NULL)
RETURNS SETOF queen.settlement
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT * FROM queen.settle(ARRAY[ack.lease_id], ARRAY[queen.lease_seqs(ack.lease_id, ack.seqs)]);
$$;

CREATE OR REPLACE FUNCTION queen.nack(lease_id uuid, seqs bigint[] DEFAULT NULL, error text DEFAULT NULL)
RETURNS SETOF queen.settlement
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT * FROM queen.settle(
        ARRAY[nack.lease_id], NULL, ARRAY[queen.lease_seqs(nack.lease_id, nack.seqs)], error => nack.error
    );
$$;

CREATE OR REPLACE FUNCTION queen.reject(lease_id uuid, seqs bigint[] DEFAULT NULL, error text DEFAULT NULL)
RETURNS SETOF queen.settlement
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT * FROM queen.settle(
        ARRAY[reject.lease_id], NULL, NULL, ARRAY[queen.lease_seqs(reject.lease_id, reject.seqs)],
        error => reject.error
    );
$$;

CREATE OR REPLACE FUNCTION queen.release(lease_id uuid, seqs bigint[] DEFAULT NULL)
RETURNS SETOF queen.settlement
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT * FROM queen.settle(
        ARRAY[release.lease_id], NULL, NULL, NULL, ARRAY[queen.lease_seqs(release.lease_id, release.seqs)]
    );
$$;

-- Extends leases to now + seconds, all or none. One that ran out and that nobody has taken over is still its holder's.
CREATE OR REPLACE FUNCTION queen.renew(lease_ids uuid[], seconds integer)
RETURNS SETOF queen.lease_expiry
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
#variable_conflict use_column
DECLARE
    until CONSTANT timestamptz := clock_timestamp() + make_interval(secs => renew.seconds);
    lease uuid;
    state queen.consumer_states;
BEGIN
    IF renew.seconds IS NULL OR renew.seconds < 1 THEN
        PERFORM queen.raise_invalid(
            format('a lease is renewed by at least 1 second, not %s', coalesce(renew.seconds::text, 'NULL'))
        );
    END IF;
    PERFORM 1 FROM queen.consumers AS c
    WHERE c.id = ANY (ARRAY(SELECT queen.lease_consumer(x.id) FROM unnest(renew.lease_ids) AS x (id)))
    ORDER BY c.id
    FOR UPDATE;
    FOREACH lease IN ARRAY renew.lease_ids LOOP
        SELECT s.* INTO state FROM queen.consumer_states AS s
        WHERE s.consumer_id = queen.lease_consumer(lease) ORDER BY s.gen DESC LIMIT 1;
        IF state.lease_id IS DISTINCT FROM lease THEN
            RAISE EXCEPTION USING
                ERRCODE = 'QN003',
                MESSAGE = format('lease %s is over: it was settled, or it ran out and another consumer took over', lease);
        END IF;
        UPDATE queen.consumer_states AS s SET lease_expires_at = until
        WHERE s.consumer_id = state.consumer_id AND s.gen = state.gen;
        -- Somebody who ran into the lease comes back when it ends, if that is sooner now.
        UPDATE queen.consumers AS c SET ready_at = until WHERE c.id = state.consumer_id AND c.ready_at > until;
        RETURN NEXT (lease, until)::queen.lease_expiry;
    END LOOP;
END
$$;
