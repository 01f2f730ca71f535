-- Subscriptions: which lanes a group reads, and where in each it begins.

-- The record that holds for a lane: the most specific one. NULL where the group never subscribed to it.
CREATE OR REPLACE FUNCTION queen.subscription_of(consumer_group text, queue queen.queues, partition text)
RETURNS queen.consumer_groups_metadata
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT s
    FROM queen.consumer_groups_metadata AS s
    WHERE
        s.consumer_group = subscription_of.consumer_group
        AND (s.queue_name IS NULL OR s.queue_name = queue.name)
        AND (s.partition_name IS NULL OR s.partition_name = partition)
        AND (s.namespace IS NULL OR s.namespace = queue.namespace)
        AND (s.task IS NULL OR s.task = queue.task)
    ORDER BY
        s.partition_name IS NULL, s.queue_name IS NULL, s.namespace IS NULL OR s.task IS NULL, s.namespace IS NULL
    LIMIT 1;
$$;

-- Every group that exists for a queue: those that have met it, and those that subscribed to its namespace or task.
CREATE OR REPLACE FUNCTION queen.groups_of(queue queen.queues)
RETURNS SETOF text
LANGUAGE sql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
    SELECT g.consumer_group FROM queen.queue_groups AS g WHERE g.queue_id = queue.id
    UNION
    SELECT s.consumer_group
    FROM queen.consumer_groups_metadata AS s
    WHERE
        s.queue_name IS NULL
        AND (s.namespace IS NULL OR s.namespace = queue.namespace)
        AND (s.task IS NULL OR s.task = queue.task);
$$;

-- The seq after which a group begins to read a lane that it meets now.
-- A lane that was not there yet when the group subscribed is read from its first message, whatever the clock said:
-- its creator may have stamped messages before the subscription and committed after it.
CREATE OR REPLACE FUNCTION queen.start_seq(
    subscription queen.consumer_groups_metadata, lane queen.lanes,
    first_contact queen.consumer_groups_metadata DEFAULT NULL -- the record that is being made, where one is
)
RETURNS bigint
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF subscription.subscription_mode IS NULL OR subscription.subscription_mode = 'all' THEN
        RETURN lane.floor_seq;
    ELSIF
        NOT pg_visible_in_snapshot(lane.created_xid, subscription.subscription_snapshot)
        AND subscription.subscription_timestamp <= subscription.created_at
    THEN
        RETURN lane.floor_seq;
    ELSIF subscription.subscription_mode = 'new' AND subscription *= first_contact THEN
        RETURN queen.seq_before(lane.id, 'infinity');
    END IF;
    RETURN queen.seq_before(lane.id, subscription.subscription_timestamp);
END
$$;

-- Remembers which message priorities a group has to look for. One probe for each of the ten.
CREATE OR REPLACE FUNCTION queen.note_priorities(consumer_group text, queue_id integer)
RETURNS void
LANGUAGE sql VOLATILE
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
    UPDATE queen.queue_groups AS g
    SET priorities = found.priorities
    FROM (
        SELECT ARRAY(
            SELECT p.priority::smallint
            FROM generate_series(9, 0, -1) AS p (priority)
            WHERE
                EXISTS (
                    SELECT 1 FROM queen.consumers AS c
                    WHERE
                        c.queue_id = note_priorities.queue_id AND c.consumer_group = note_priorities.consumer_group
                        AND c.priority = p.priority AND c.ready_at IS NOT NULL
                )
                OR p.priority = ANY (
                    SELECT unnest(k.priorities) FROM queen.queue_groups AS k
                    WHERE k.queue_id = note_priorities.queue_id AND k.consumer_group = note_priorities.consumer_group
                )
            ORDER BY p.priority DESC
        ) AS priorities
    ) AS found
    WHERE
        g.queue_id = note_priorities.queue_id AND g.consumer_group = note_priorities.consumer_group
        AND g.priorities <> found.priorities;
$$;

-- Records the group's first contact with a scope and gives it a row in consumers for each lane it does not know yet.
--
-- Nobody waits for anybody's open transaction here:
--   discover | discover, same group   the second does without: the first is finding what there is. At a first contact
--                                     it waits a tenth of a second, since without rows there is nothing to pop.
--                                     (seek and requeue cannot do without: they wait for the lock before they call.)
--   discover | a push creates a lane  neither sees the other. The lane's creator has a higher transaction id than
--                                     discovered_xid, the oldest one still running now, so a later pop finds it.
--   discover | a push to a lane       the push cannot wake a row that it does not see, so no row begins as drained.
--   discover | retention              the lane's row: a lane that retention is deleting from is met by a later pop, and
--                                     retention leaves out a lane that we are just giving to a group.
--   discover | delete_queue           the queue's row: delete waits for us, or we find no queue.
CREATE OR REPLACE FUNCTION queen.discover(
    consumer_group text, queue_ids integer[], queue_name text, partition text, namespace text, task text,
    subscription_mode text, subscription_from timestamptz, ready_since timestamptz
)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = OFF
SET jit = OFF
AS $$
#variable_conflict use_column
DECLARE
    tries CONSTANT integer := 20;
    first_contact queen.consumer_groups_metadata;
    qid integer;
    ended_xid xid8;
    queue queen.queues;
    known queen.queue_groups;
    subscription queen.consumer_groups_metadata;
    by_partition boolean;
BEGIN
    FOR i IN 1..tries LOOP
        -- Taken again and again by one transaction these locks cost nothing, so a round that stops half-way does no harm.
        EXIT WHEN
            pg_try_advisory_xact_lock(queen.subscription_lock(
                discover.consumer_group, discover.queue_name, discover.partition, discover.namespace, discover.task
            ))
            AND NOT EXISTS (
                SELECT 1 FROM unnest(discover.queue_ids) AS x (id)
                WHERE NOT pg_try_advisory_xact_lock(queen.discovery_lock(x.id, discover.consumer_group))
            );
        IF i = tries OR NOT EXISTS (
            SELECT 1 FROM unnest(discover.queue_ids) AS x (id)
            WHERE NOT EXISTS (
                SELECT 1 FROM queen.queue_groups AS g
                WHERE g.queue_id = x.id AND g.consumer_group = discover.consumer_group
            )
        ) THEN
            RETURN;
        END IF;
        PERFORM pg_sleep(0.005);
    END LOOP;

    -- The queues' rows before anything is written for them: what delete_queue takes along must be complete.
    FOREACH qid IN ARRAY discover.queue_ids LOOP
        PERFORM 1 FROM queen.queues AS q WHERE q.id = qid FOR KEY SHARE;
        IF NOT FOUND AND discover.queue_name IS NOT NULL THEN
            PERFORM queen.raise_unknown_queue(discover.queue_name);
        END IF;
    END LOOP;
    INSERT INTO queen.consumer_groups_metadata AS s (
        consumer_group, queue_name, partition_name, namespace, task, subscription_mode, subscription_timestamp
    )
    VALUES (
        discover.consumer_group, discover.queue_name, discover.partition, discover.namespace, discover.task,
        discover.subscription_mode,
        CASE discover.subscription_mode
            WHEN 'all' THEN '-infinity' WHEN 'new' THEN clock_timestamp() ELSE discover.subscription_from
        END
    )
    ON CONFLICT DO NOTHING
    RETURNING s.* INTO first_contact;

    FOREACH qid IN ARRAY discover.queue_ids LOOP
        SELECT q.* INTO queue FROM queen.queues AS q WHERE q.id = qid;
        CONTINUE WHEN NOT FOUND;
        INSERT INTO queen.queue_groups AS g (queue_id, consumer_group, is_subscribed)
        VALUES (qid, discover.consumer_group, discover.queue_name IS NOT NULL AND discover.partition IS NULL)
        ON CONFLICT (queue_id, consumer_group) DO UPDATE
            SET is_subscribed = TRUE
            WHERE excluded.is_subscribed AND NOT g.is_subscribed;
        SELECT g.* INTO known FROM queen.queue_groups AS g
        WHERE g.queue_id = queue.id AND g.consumer_group = discover.consumer_group;
        IF known.discovered_xid > pg_snapshot_xmax(pg_current_snapshot()) THEN
            -- A restored dump: these transaction ids are another cluster's. All its lanes are old ones here.
            UPDATE queen.lanes AS l SET created_xid = '3'
            WHERE l.queue_id = queue.id AND l.created_xid > pg_snapshot_xmax(pg_current_snapshot());
            known.discovered_xid := '0';
        END IF;
        subscription := queen.subscription_of(discover.consumer_group, queue, NULL);
        by_partition := EXISTS (
            SELECT 1 FROM queen.consumer_groups_metadata AS s
            WHERE
                s.queue_name = queue.name AND s.consumer_group = discover.consumer_group
                AND s.partition_name IS NOT NULL
        );
        -- Before the search: what ended later than this, and after the search has begun, stays to be found.
        ended_xid := pg_snapshot_xmin(pg_current_snapshot());
        INSERT INTO queen.consumers (lane_id, queue_id, priority, consumer_group, start_seq, ready_at)
        SELECT
            f.id, f.queue_id, f.priority, discover.consumer_group, f.start_seq,
            -- Those with messages first, the oldest first of all; the others are looked at when nothing else is left.
            coalesce(
                (
                    SELECT least(m.created_at, discover.ready_since) FROM queen.message_log AS m
                    WHERE m.lane_id = f.id AND m.seq > f.start_seq ORDER BY m.seq LIMIT 1
                ),
                discover.ready_since
            )
        FROM (
            SELECT
                l.id, l.queue_id, l.priority,
                CASE
                    WHEN NOT by_partition AND coalesce(subscription.subscription_mode, 'all') = 'all' THEN l.floor_seq
                    WHEN NOT by_partition THEN queen.start_seq(subscription, l, first_contact)
                    ELSE queen.start_seq(
                        queen.subscription_of(discover.consumer_group, queue, l.name), l, first_contact
                    )
                END AS start_seq
            FROM queen.lanes AS l
            WHERE
                l.queue_id = queue.id
                AND l.created_xid >= known.discovered_xid
                AND (discover.partition IS NULL OR l.name = discover.partition)
                AND (
                    SELECT c.id FROM queen.consumers AS c
                    WHERE c.lane_id = l.id AND c.consumer_group = discover.consumer_group
                    LIMIT 1
                ) IS NULL
            FOR SHARE OF l SKIP LOCKED
        ) AS f
        ON CONFLICT (lane_id, consumer_group) DO NOTHING;
        PERFORM queen.note_priorities(discover.consumer_group, queue.id);
        IF
            discover.partition IS NULL AND known.discovered_xid < ended_xid
            AND NOT EXISTS (
                SELECT 1 FROM queen.lanes AS l
                WHERE
                    l.queue_id = queue.id AND l.created_xid >= known.discovered_xid AND l.created_xid < ended_xid
                    AND (
                        SELECT c.id FROM queen.consumers AS c
                        WHERE c.lane_id = l.id AND c.consumer_group = discover.consumer_group
                        LIMIT 1
                    ) IS NULL
            )
        THEN
            UPDATE queen.queue_groups AS g
            SET discovered_xid = ended_xid
            WHERE g.queue_id = queue.id AND g.consumer_group = discover.consumer_group;
        END IF;
    END LOOP;
END
$$;
