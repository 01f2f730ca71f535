-- The queue's tables. The rules that work on them are in sql/functions; nothing here calls a function of ours.
--
-- Three kinds of tables, by how they change:
--   settings     queues, partitions, lanes, consumer_groups_metadata, queue_groups    rarely updated
--   logs         message_log, deliveries, dead_letter_queue, retention_history        inserted, deleted by retention
--   state        consumer_states     one row per transition, the newest generation is the truth
-- Nothing that every push or pop touches is updated in place: under a snapshot that somebody holds (pg_dump, a long
-- report) old versions of an updated row pile up and each look-up walks over all of them. A look-up of the newest
-- generation, or of the last message, starts at the right end of an index and never meets them.

CREATE TABLE queen.queues (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE CHECK (length(name) BETWEEN 1 AND 255),
    namespace text CHECK (length(namespace) BETWEEN 1 AND 255),
    task text CHECK (length(task) BETWEEN 1 AND 255),
    priority integer NOT NULL DEFAULT 0,
    lease_time integer NOT NULL DEFAULT 300 CHECK (lease_time > 0),
    retry_limit integer NOT NULL DEFAULT 3 CHECK (retry_limit >= 0),
    retry_delay integer NOT NULL DEFAULT 1000 CHECK (retry_delay >= 0),
    dlq_after_max_retries boolean NOT NULL DEFAULT TRUE,
    delayed_processing integer NOT NULL DEFAULT 0 CHECK (delayed_processing >= 0),
    window_buffer integer NOT NULL DEFAULT 0 CHECK (window_buffer >= 0),
    max_wait_time_seconds integer NOT NULL DEFAULT 0 CHECK (max_wait_time_seconds >= 0),
    max_queue_size bigint NOT NULL DEFAULT 0 CHECK (max_queue_size >= 0),
    max_message_bytes integer NOT NULL DEFAULT 1048576 CHECK (max_message_bytes > 0),
    retention_enabled boolean NOT NULL DEFAULT FALSE,
    retention_seconds integer NOT NULL DEFAULT 0 CHECK (retention_seconds >= 0),
    completed_retention_seconds integer NOT NULL DEFAULT 0 CHECK (completed_retention_seconds >= 0),
    encryption_enabled boolean NOT NULL DEFAULT FALSE,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX queues_namespace_task ON queen.queues (namespace, task);
COMMENT ON TABLE queen.queues IS 'Queues and their options.';

CREATE TABLE queen.partitions (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id integer NOT NULL REFERENCES queen.queues (id),
    name text NOT NULL CHECK (length(name) BETWEEN 1 AND 255),
    created_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (queue_id, name)
);
COMMENT ON TABLE queen.partitions IS 'FIFO lanes inside a queue, created by their first push.';

-- A partition and a message priority: each lane has its own order, seq, cursors and leases. Most partitions have one.
CREATE TABLE queen.lanes (
    id bigint PRIMARY KEY, -- partition_id * 10 + priority: either is had back without a look-up
    queue_id integer NOT NULL,
    priority smallint NOT NULL CHECK (priority BETWEEN 0 AND 9),
    -- Who created it. A group has discovered every lane whose creator had ended when it last looked (queue_groups).
    created_xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The highest seq that retention removed, and its time. The last seq of a lane is that of its last row, or this.
    floor_seq bigint NOT NULL DEFAULT 0,
    floor_created_at timestamptz NOT NULL DEFAULT '-infinity',
    name text NOT NULL, -- the partition's: a push finds the lane with one probe
    UNIQUE (queue_id, name, priority)
);
CREATE INDEX lanes_created ON queen.lanes (queue_id, created_xid);
COMMENT ON TABLE queen.lanes IS 'One row per partition and message priority in use.';

-- Immutable. (lane_id, seq) is the address; the view queen.messages shows it as an id, with names.
-- payload is json, not jsonb: what was pushed comes back byte for byte, and neither side pays for the conversion.
CREATE TABLE queen.message_log (
    lane_id bigint NOT NULL,
    seq bigint NOT NULL,
    created_at timestamptz NOT NULL,
    trace_id uuid,
    is_encrypted boolean NOT NULL DEFAULT FALSE,
    transaction_id text NOT NULL,
    payload json NOT NULL,
    -- Of a message that came back from the dead letters: what it was, and the transaction id it was encrypted under.
    requeued_from uuid,
    origin_transaction_id text,
    id_salt smallint, -- NULL but for one in 10^9 messages or so
    PRIMARY KEY (lane_id, seq)
) WITH (
    autovacuum_vacuum_insert_threshold = 200000, autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_vacuum_threshold = 50000, autovacuum_vacuum_scale_factor = 0, vacuum_truncate = OFF
);
-- Dedupe, over all lanes of a partition: 8 bytes a message, the partition is the hash's seed. Being unique it costs no
-- look-up of its own: an insert finds a repeated id on its way (queen.push then looks closer). Two ids that share a
-- hash are told apart by their texts, and the second one stored gets a salt.
CREATE UNIQUE INDEX message_log_transaction ON queen.message_log (
    int8xor(hashtextextended(transaction_id, lane_id / 10), coalesce(id_salt, 0)::bigint)
);
-- For people who follow a pipeline, at almost no cost for those who push: a btree on random ids costs 3 microseconds
-- and 75 bytes of WAL a message, this one next to nothing. A look-up reads the summaries, a small part of the table.
CREATE INDEX message_log_trace ON queen.message_log
USING brin (trace_id uuid_bloom_ops (n_distinct_per_range = 1000, false_positive_rate = 0.01))
WITH (pages_per_range = 32, autosummarize = ON);
COMMENT ON TABLE queen.message_log IS 'Messages as stored, with addresses instead of names: read the view messages.';

-- First contact of a group with a queue, a partition, a namespace or a task: where it starts to read.
CREATE TABLE queen.consumer_groups_metadata (
    consumer_group text NOT NULL CHECK (length(consumer_group) BETWEEN 1 AND 255),
    queue_name text,
    partition_name text,
    namespace text,
    task text,
    subscription_mode text NOT NULL CHECK (subscription_mode IN ('all', 'new', 'timestamp')),
    subscription_timestamp timestamptz NOT NULL,
    -- What was there at first contact: a lane that this snapshot does not show is read from its first message.
    subscription_snapshot pg_snapshot NOT NULL DEFAULT pg_current_snapshot(),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CHECK (num_nonnulls(queue_name, namespace, task) > 0),
    CHECK (partition_name IS NULL OR queue_name IS NOT NULL)
);
CREATE UNIQUE INDEX consumer_groups_metadata_key ON queen.consumer_groups_metadata (
    consumer_group,
    coalesce(queue_name, ''),
    coalesce(partition_name, ''),
    coalesce(namespace, ''),
    coalesce(task, '')
);
CREATE INDEX consumer_groups_metadata_queue ON queen.consumer_groups_metadata (queue_name);
COMMENT ON TABLE queen.consumer_groups_metadata IS 'Subscriptions: one row per group and what it subscribed to.';

-- The groups that exist, per queue. Lanes created by transactions before discovered_xid have a row in consumers.
CREATE TABLE queen.queue_groups (
    queue_id integer NOT NULL REFERENCES queen.queues (id),
    consumer_group text NOT NULL,
    discovered_xid xid8 NOT NULL DEFAULT '0',
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    is_subscribed boolean NOT NULL DEFAULT FALSE, -- to the whole queue, by a record of its own
    priorities smallint[] NOT NULL DEFAULT '{}', -- of the lanes it has met, highest first: where a pop looks
    PRIMARY KEY (queue_id, consumer_group)
);
CREATE INDEX queue_groups_group ON queen.queue_groups (consumer_group);

-- One row per lane and group. It is what a pop finds and locks; what it holds is in consumer_states.
--   ready_at NULL      drained: nothing is pending. Set only under the partition's push lock.
--   ready_at <= now    perhaps something to deliver; the pop that finds nothing says so here.
--   ready_at > now     nothing to deliver before: a delay, a backoff, a lease that somebody ran into.
CREATE TABLE queen.consumers (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    lane_id bigint NOT NULL,
    ready_at timestamptz,
    start_seq bigint NOT NULL, -- where the group began to read: the cursor until there is a state
    queue_id integer NOT NULL,
    priority smallint NOT NULL,
    consumer_group text NOT NULL,
    UNIQUE (lane_id, consumer_group)
) WITH (
    fillfactor = 70, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0.01, vacuum_truncate = OFF
);
CREATE INDEX consumers_ready ON queen.consumers (queue_id, consumer_group, priority, ready_at)
WHERE ready_at IS NOT NULL;

-- The cursor and the lease of a consumer. A transition inserts generation n + 1 and deletes n, by their keys; the
-- primary key lets only one of two transitions from the same state through, whatever isolation they run in.
CREATE TABLE queen.consumer_states (
    consumer_id bigint NOT NULL,
    gen bigint NOT NULL,
    -- Everything up to the cursor is settled; ahead holds what was settled beyond it.
    cursor bigint NOT NULL,
    -- Up to here messages were in a batch whose consumer died: delivered one at a time, so that only the poison stays.
    suspect_through bigint NOT NULL DEFAULT 0,
    -- Over the consumer's life.
    total_completed bigint NOT NULL DEFAULT 0,
    total_dropped bigint NOT NULL DEFAULT 0,
    settled_at timestamptz,
    -- No delivery before: the backoff of a failure.
    retry_at timestamptz,
    -- How many rows of redeliveries this consumer has: none, and the ordinary path does not look.
    redelivering integer NOT NULL DEFAULT 0,
    -- The lease, while there is one: its token, what it still holds, and what of it was settled so far.
    attempt integer NOT NULL DEFAULT 0,
    completed integer NOT NULL DEFAULT 0,
    failed integer NOT NULL DEFAULT 0,
    rejected integer NOT NULL DEFAULT 0,
    released integer NOT NULL DEFAULT 0,
    lease_id uuid,
    lease_expires_at timestamptz,
    popped_at timestamptz,
    first_seq bigint,
    last_seq bigint,
    ahead int8multirange NOT NULL DEFAULT '{}',
    held int8multirange NOT NULL DEFAULT '{}',
    PRIMARY KEY (consumer_id, gen)
) WITH (
    autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_insert_threshold = -1, vacuum_truncate = OFF
);

-- Messages that failed, or whose consumer died, and are not settled yet: their attempt is failures + 1.
CREATE TABLE queen.redeliveries (
    consumer_id bigint NOT NULL,
    seq bigint NOT NULL,
    failures integer NOT NULL,
    error_message text,
    PRIMARY KEY (consumer_id, seq)
) WITH (fillfactor = 70, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

CREATE TABLE queen.deliveries (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    lane_id bigint NOT NULL,
    first_seq bigint NOT NULL,
    last_seq bigint NOT NULL,
    popped_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL,
    completed integer NOT NULL,
    failed integer NOT NULL,
    rejected integer NOT NULL,
    released integer NOT NULL,
    expired integer NOT NULL,
    attempt integer NOT NULL, -- of the message in the lease that had been tried most often
    priority smallint NOT NULL,
    queue_name text NOT NULL,
    partition_name text NOT NULL,
    consumer_group text NOT NULL
) WITH (autovacuum_vacuum_insert_threshold = 100000, autovacuum_vacuum_insert_scale_factor = 0);
CREATE INDEX deliveries_ended_at ON queen.deliveries USING brin (ended_at) WITH (pages_per_range = 16);
COMMENT ON TABLE queen.deliveries IS 'One row per lease that ended, by settlement or by expiry.';

-- Own copy of the payload: retention may delete the message, the evidence stays.
CREATE TABLE queen.dead_letter_queue (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id integer NOT NULL REFERENCES queen.queues (id),
    lane_id bigint NOT NULL,
    seq bigint NOT NULL,
    message_id uuid NOT NULL,
    consumer_group text NOT NULL,
    partition_name text NOT NULL,
    priority smallint NOT NULL,
    transaction_id text NOT NULL,
    origin_transaction_id text,
    trace_id uuid,
    payload json NOT NULL,
    is_encrypted boolean NOT NULL,
    reason text NOT NULL CHECK (reason IN ('failed', 'rejected', 'expired', 'evicted')),
    error_message text,
    retry_count integer NOT NULL,
    original_created_at timestamptz NOT NULL,
    failed_at timestamptz NOT NULL,
    requeued_at timestamptz,
    requeued_message_id uuid
);
CREATE INDEX dead_letter_queue_queue ON queen.dead_letter_queue (queue_id, id);
CREATE INDEX dead_letter_queue_waiting ON queen.dead_letter_queue (queue_id, consumer_group, id)
WHERE requeued_at IS NULL;
COMMENT ON TABLE queen.dead_letter_queue IS 'Messages that a group gave up on; requeued_at says that one went back.';

CREATE TABLE queen.retention_history (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_name text NOT NULL,
    partition_name text NOT NULL,
    lane_id bigint NOT NULL,
    retention_type text NOT NULL CHECK (retention_type IN ('retention', 'completed', 'evicted')),
    messages_deleted bigint NOT NULL,
    first_seq bigint NOT NULL,
    last_seq bigint NOT NULL,
    executed_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX retention_history_executed_at ON queen.retention_history (executed_at);
COMMENT ON TABLE queen.retention_history IS 'What retention and eviction removed, when, from which partition.';

-- Rows with an empty consumer_group are about the queue itself: what producers pushed.
CREATE TABLE queen.queue_metrics (
    queue_name text NOT NULL,
    consumer_group text NOT NULL,
    bucket_start timestamptz NOT NULL,
    bucket_seconds integer NOT NULL,
    pushed bigint NOT NULL DEFAULT 0,
    completed bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    dead_lettered bigint NOT NULL DEFAULT 0,
    -- Messages a second, pushed or completed: one of the two is 0.
    throughput double precision GENERATED ALWAYS AS ((pushed + completed)::double precision / bucket_seconds) STORED,
    latency_p50_ms double precision,
    latency_p95_ms double precision,
    latency_p99_ms double precision,
    processing_p50_ms double precision,
    processing_p95_ms double precision,
    processing_p99_ms double precision,
    partitions bigint NOT NULL DEFAULT 0,
    skew double precision, -- of the busiest partition to the mean of them: 1 is even
    payload_bytes bigint NOT NULL DEFAULT 0,
    largest_payload_bytes bigint NOT NULL DEFAULT 0,
    deliveries bigint NOT NULL DEFAULT 0,
    redeliveries bigint NOT NULL DEFAULT 0,
    rejected bigint NOT NULL DEFAULT 0,
    released bigint NOT NULL DEFAULT 0,
    expired bigint NOT NULL DEFAULT 0,
    busy_seconds double precision NOT NULL DEFAULT 0,
    -- Measured by the run whose moment lies in this bucket; the slope is in messages a second since the run before.
    pending bigint,
    pending_at timestamptz,
    pending_slope double precision,
    oldest_age_seconds double precision,
    computed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (queue_name, consumer_group, bucket_start, bucket_seconds)
);

CREATE TABLE queen.anomalies (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    detected_at timestamptz NOT NULL DEFAULT now(),
    queue_name text NOT NULL,
    partition_name text,
    consumer_group text,
    kind text NOT NULL,
    severity text NOT NULL CHECK (severity IN ('info', 'warning', 'critical')),
    reason text NOT NULL,
    value double precision
);
CREATE INDEX anomalies_detected_at ON queen.anomalies (detected_at);

-- What functions return where a table's row does not serve. (In RETURNS TABLE no column may have an argument's name.)
CREATE TYPE queen.popped_message AS (
    message_id uuid,
    transaction_id text,
    trace_id uuid,
    queue_name text,
    partition text,
    priority smallint,
    seq bigint,
    payload json,
    is_encrypted boolean,
    origin_transaction_id text,
    created_at timestamptz,
    attempt integer,
    lease_id uuid,
    lease_expires_at timestamptz,
    consumer_group text
);
-- What a push answers. One element of lane_ids stands for all messages; without seqs they run on from first_seq;
-- without is_new all are new; transaction_ids are there where the producer left some out.
CREATE TYPE queen.pushed_batch AS (
    lane_ids bigint ARRAY,
    first_seq bigint,
    seqs bigint ARRAY,
    is_new boolean ARRAY,
    transaction_ids text ARRAY
);
CREATE TYPE queen.settlement AS (
    lease_id uuid,
    completed integer,
    retried integer,
    dead_lettered integer,
    dropped integer,
    released integer,
    remaining integer
);
CREATE TYPE queen.lane_tail AS (seq bigint, created_at timestamptz);
CREATE TYPE queen.lease_expiry AS (lease_id uuid, lease_expires_at timestamptz);
CREATE TYPE queen.partition_stats AS (
    queue_name text,
    namespace text,
    task text,
    partition text,
    priority smallint,
    consumer_group text,
    first_seq bigint,
    last_seq bigint,
    retained bigint,
    cursor bigint,
    pending bigint,
    in_flight bigint,
    lease_expires_at timestamptz,
    ready_at timestamptz,
    oldest_age_seconds double precision,
    dead_letters bigint,
    total_completed bigint,
    total_dropped bigint,
    last_pushed_at timestamptz,
    last_settled_at timestamptz
);
CREATE TYPE queen.group_summary AS (
    consumer_group text,
    queue_name text,
    subscription_mode text,
    subscribed_at timestamptz,
    partitions bigint,
    pending bigint,
    in_flight bigint,
    last_settled_at timestamptz
);
CREATE TYPE queen.dead_letter AS (
    id bigint,
    queue_name text,
    partition text,
    priority smallint,
    seq bigint,
    message_id uuid,
    consumer_group text,
    transaction_id text,
    trace_id uuid,
    payload json,
    is_encrypted boolean,
    origin_transaction_id text,
    reason text,
    error_message text,
    retry_count integer,
    original_created_at timestamptz,
    failed_at timestamptz,
    requeued_at timestamptz,
    requeued_message_id uuid
);
CREATE TYPE queen.requeued_message AS (id bigint, message_id uuid, seq bigint, partition text);
CREATE TYPE queen.eviction AS (queue_name text, consumer_group text, evicted bigint);
CREATE TYPE queen.retained_partition AS (queue_name text, partition text, retention_type text, deleted bigint);
