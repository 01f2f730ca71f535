-- What the other files stand on: ids, locks, errors, arithmetic on cursors.
--
-- Locks are always taken in this order, so that two calls never wait for each other in a circle:
--   1. the queue        advisory, by name; shared by pushes, exclusive by delete_queue and by pushes of huge fan-out
--   2. the capacity     advisory, by queue; only pushes to a queue with max_queue_size
--   3. the partitions   advisory, by ascending id; pushes
--   4. the consumers    row locks, by ascending id where one waits for them; pops skip what is locked
-- A pop goes against it once, from 4 to 3, to call a lane drained: there it only tries, and never waits.
-- A caller's own transaction may combine calls in any order; PostgreSQL then breaks a circle with 40P01.
--
-- Functions that look things up carry settings: the search path, so that nobody's objects come in between; no
-- sequential scans, since a plan may be made while a table is empty and kept when it is not; with that no JIT, which
-- would take the price put on a forbidden scan for a long query. For the same reason they join arrays to tables only
-- by LATERAL (... LIMIT 1) or by = ANY (array), and ask what a table lacks by (SELECT ... LIMIT 1) IS NULL: of a plain
-- join the planner may begin at the table, or walk all of an index, which is cheap while there are ten rows.
-- ORDER BY id + 0 stands where rows are found by another index than the primary key, which it would walk to be spared
-- a sort.

-- A message's id is its address, so none is stored: a UUID of version 8 over (lane, seq).
CREATE OR REPLACE FUNCTION queen.message_id(lane_id bigint, seq bigint)
RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT (lpad(to_hex(lane_id), 12, '0') || '80008' || lpad(to_hex(seq), 15, '0'))::uuid;
$$;

CREATE OR REPLACE FUNCTION queen.message_lane(message_id uuid)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT ('x' || left(replace(message_id::text, '-', ''), 12))::bit(48)::bigint;
$$;

CREATE OR REPLACE FUNCTION queen.message_seq(message_id uuid)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT ('x' || right(replace(message_id::text, '-', ''), 15))::bit(60)::bigint;
$$;

-- A lease's token names its consumer, so that settling needs no index on tokens; the rest is random.
CREATE OR REPLACE FUNCTION queen.new_lease_id(consumer_id bigint)
RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
    SELECT (lpad(to_hex(consumer_id), 12, '0') || right(replace(gen_random_uuid()::text, '-', ''), 20))::uuid;
$$;

CREATE OR REPLACE FUNCTION queen.lease_consumer(lease_id uuid)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT ('x' || left(replace(lease_id::text, '-', ''), 12))::bit(48)::bigint;
$$;

CREATE OR REPLACE FUNCTION queen.queue_lock(queue_name text)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT hashtextextended(queue_name, 5817410277391022101);
$$;

CREATE OR REPLACE FUNCTION queen.capacity_lock(queue_id integer)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT hashint8extended(queue_id::bigint, 5817410277391022102);
$$;

CREATE OR REPLACE FUNCTION queen.partition_lock(partition_id bigint)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT hashint8extended(partition_id, 5817410277391022103);
$$;

CREATE OR REPLACE FUNCTION queen.discovery_lock(queue_id integer, consumer_group text)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT hashtextextended(consumer_group, 5817410277391022104 + queue_id);
$$;

CREATE OR REPLACE FUNCTION queen.subscription_lock(
    consumer_group text, queue_name text, partition text, namespace text, task text
)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT hashtextextended(
        jsonb_build_array(consumer_group, queue_name, partition, namespace, task)::text, 5817410277391022105
    );
$$;

-- The word of the list that shares most letter pairs with the given one; NULL for an empty list.
CREATE OR REPLACE FUNCTION queen.nearest(word text, words text[])
RETURNS text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT c.candidate
    FROM unnest(words) AS c (candidate)
    ORDER BY
        (
            SELECT count(*)
            FROM generate_series(1, length(word) - 1) AS i
            WHERE strpos(lower(c.candidate), lower(substr(word, i, 2))) > 0
        )::float8 / greatest(length(word), length(c.candidate)) DESC,
        abs(length(c.candidate) - length(word)),
        c.candidate
    LIMIT 1;
$$;

-- Errors of the product have the SQLSTATEs QN001 to QN005, so that a client in any language can tell them apart.
CREATE OR REPLACE FUNCTION queen.raise_unknown_queue(queue_name text)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    near text := queen.nearest(queue_name, (SELECT array_agg(q.name) FROM queen.queues AS q));
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'QN001',
        MESSAGE = format('there is no queue %s', coalesce(quote_literal(queue_name), 'NULL'))
            || coalesce('; the nearest name is ' || quote_literal(near), '; there are no queues yet'),
        HINT = 'Create it with configure_queue.';
END
$$;

CREATE OR REPLACE FUNCTION queen.raise_invalid(message text)
RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'QN004', MESSAGE = raise_invalid.message;
END
$$;

CREATE OR REPLACE FUNCTION queen.queue_id_of(queue_name text)
RETURNS integer
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    found_id integer;
BEGIN
    SELECT q.id INTO found_id FROM queen.queues AS q WHERE q.name = queue_id_of.queue_name;
    IF NOT FOUND THEN
        PERFORM queen.raise_unknown_queue(queue_id_of.queue_name);
    END IF;
    RETURN found_id;
END
$$;

-- Names of queues, partitions, namespaces, tasks and groups: 1 to 255 characters.
CREATE OR REPLACE FUNCTION queen.check_name(kind text, name text)
RETURNS void
LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    IF length(name) NOT BETWEEN 1 AND 255 THEN
        RAISE EXCEPTION USING
            ERRCODE = 'QN004',
            MESSAGE = pg_catalog.format('a %s has 1 to 255 characters, not %s: %L', kind, length(name), left(name, 40));
    END IF;
END
$$;

-- How many numbers a multirange holds.
CREATE OR REPLACE FUNCTION queen.size(numbers int8multirange)
RETURNS bigint
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
BEGIN
    IF numbers IS NULL OR isempty(numbers) THEN
        RETURN 0;
    ELSIF numbers = int8multirange(range_merge(numbers)) THEN
        RETURN upper(numbers) - lower(numbers);
    END IF;
    RETURN (SELECT sum(upper(r) - lower(r)) FROM unnest(numbers) AS r);
END
$$;

CREATE OR REPLACE FUNCTION queen.span(first_seq bigint, last_seq bigint)
RETURNS int8multirange
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT int8multirange(int8range(first_seq, last_seq, '[]'));
$$;

-- The cursor after everything that was settled right behind it.
CREATE OR REPLACE FUNCTION queen.fold(at_seq bigint, ahead int8multirange)
RETURNS bigint
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
BEGIN
    IF isempty(ahead) OR NOT ahead @> (at_seq + 1) THEN
        RETURN at_seq;
    END IF;
    RETURN (SELECT upper(r) - 1 FROM unnest(ahead) AS r WHERE r @> (at_seq + 1));
END
$$;

-- What of `ahead` lies beyond the cursor.
CREATE OR REPLACE FUNCTION queen.beyond(at_seq bigint, ahead int8multirange)
RETURNS int8multirange
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT ahead * int8multirange(int8range(at_seq + 1, NULL));
$$;

-- The seq of the wanted-th message after the cursor that was not settled ahead of it.
CREATE OR REPLACE FUNCTION queen.seq_after(at_seq bigint, ahead int8multirange, wanted bigint)
RETURNS bigint
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
DECLARE
    last_seq bigint := at_seq + wanted;
    settled int8range;
BEGIN
    IF NOT isempty(ahead) THEN
        FOR settled IN SELECT r FROM unnest(ahead) AS r ORDER BY r LOOP
            EXIT WHEN lower(settled) > last_seq;
            last_seq := last_seq + upper(settled) - lower(settled);
        END LOOP;
    END IF;
    RETURN last_seq;
END
$$;

-- The last seq of a lane that was pushed before a moment; what retention removed counts as before.
-- created_at never falls as seq rises and seqs have no gaps, so this is a binary search over the primary key.
CREATE OR REPLACE FUNCTION queen.seq_before(lane_id bigint, moment timestamptz)
RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
DECLARE
    low bigint;  -- known to be before
    high bigint; -- known not to be
    middle bigint;
    middle_at timestamptz;
BEGIN
    SELECT l.floor_seq INTO low FROM queen.lanes AS l WHERE l.id = seq_before.lane_id;
    SELECT m.seq, m.created_at INTO high, middle_at
    FROM queen.message_log AS m
    WHERE m.lane_id = seq_before.lane_id
    ORDER BY m.seq DESC
    LIMIT 1;
    IF high IS NULL THEN
        RETURN low;
    ELSIF middle_at < moment THEN
        RETURN high;
    END IF;
    WHILE high - low > 1 LOOP
        middle := (low + high) / 2;
        SELECT m.created_at INTO middle_at
        FROM queen.message_log AS m
        WHERE m.lane_id = seq_before.lane_id AND m.seq = middle;
        -- NOT FOUND: retention has just removed it.
        IF NOT FOUND OR middle_at < moment THEN
            low := middle;
        ELSE
            high := middle;
        END IF;
    END LOOP;
    RETURN low;
END
$$;
