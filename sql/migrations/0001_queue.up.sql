-- The queue's tables. The rules that work on them are in sql/functions; nothing here calls a function of ours.
--
-- Three kinds of tables, by how they change:
--   settings     queues, partitions, consumers, consumer_groups_metadata     rarely updated
--   logs         message_log, deliveries, dead_letter_queue, retention_history   inserted, deleted by retention
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
    -- The message priorities in use, highest first. A pop probes the ready index once for each.
    lane_priorities smallint [] NOT NULL DEFAULT '{0}',
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX queues_namespace_task ON queen.queues (namespace, task);
COMMENT ON TABLE queen.queues IS 'Queues and their options.';

-- One row per lane: messages of different priority in one partition are lanes of their own.
CREATE TABLE queen.partitions (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id integer NOT NULL REFERENCES queen.queues (id),
    name text NOT NULL CHECK (length(name) BETWEEN 1 AND 255),
    priority smallint NOT NULL DEFAULT 0 CHECK (priority BETWEEN 0 AND 9),
    -- The highest seq that retention removed, and its time. The last seq of a lane is that of its last row, or this.
    floor_seq bigint NOT NULL DEFAULT 0,
    floor_created_at timestamptz NOT NULL DEFAULT '-infinity',
    created_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (queue_id, name, priority)
);
COMMENT ON TABLE queen.partitions IS 'FIFO lanes: one row per partition and message priority.';

-- Immutable. (partition_id, seq) is the address; the view queen.messages shows it as an id, with names.
-- payload is json, not jsonb: what was pushed comes back byte for byte, and neither side pays for the conversion.
CREATE TABLE queen.message_log (
    partition_id bigint NOT NULL,
    seq bigint NOT NULL,
    created_at timestamptz NOT NULL,
    trace_id uuid,
    is_encrypted boolean NOT NULL DEFAULT FALSE,
    transaction_id text NOT NULL,
    payload json NOT NULL,
    PRIMARY KEY (partition_id, seq)
) WITH (
    autovacuum_vacuum_insert_threshold = 200000, autovacuum_vacuum_insert_scale_factor = 0,
    autovacuum_vacuum_threshold = 50000, autovacuum_vacuum_scale_factor = 0, vacuum_truncate = OFF
);
-- Dedupe. The partition is the hash's seed, so the key is 8 bytes and this is the only index that can serve the
-- probe: with (partition_id, hash) a plan made while the table was empty may walk the whole partition instead.
-- Two ids may share a hash, so the probe compares the text too.
CREATE INDEX message_log_transaction ON queen.message_log (hashtextextended(transaction_id, partition_id));
CREATE INDEX message_log_trace ON queen.message_log (trace_id) WHERE trace_id IS NOT NULL;
COMMENT ON TABLE queen.message_log IS 'Messages as stored. Read the view queen.messages.';

-- First contact of a group with a queue, a partition, a namespace or a task: where it starts to read.
CREATE TABLE queen.consumer_groups_metadata (
    consumer_group text NOT NULL CHECK (length(consumer_group) BETWEEN 1 AND 255),
    queue_name text,
    partition_name text,
    namespace text,
    task text,
    subscription_mode text NOT NULL CHECK (subscription_mode IN ('all', 'new', 'timestamp')),
    subscription_timestamp timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
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

-- One row per lane and group. It is what a pop finds and locks; what it holds is in consumer_states.
--   ready_at NULL      drained: nothing is pending. Set only under the lane's push lock.
--   ready_at <= now    perhaps something to deliver; the pop that finds nothing says so here.
--   ready_at > now     nothing to deliver before: a delay, a backoff, a lease that somebody ran into.
CREATE TABLE queen.consumers (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_id integer NOT NULL REFERENCES queen.queues (id),
    partition_id bigint NOT NULL REFERENCES queen.partitions (id),
    priority smallint NOT NULL,
    ready_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now(),
    consumer_group text NOT NULL,
    UNIQUE (partition_id, consumer_group)
) WITH (
    fillfactor = 70, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0.01, vacuum_truncate = OFF
);
CREATE INDEX consumers_ready ON queen.consumers (queue_id, consumer_group, priority, ready_at)
WHERE ready_at IS NOT NULL;
CREATE INDEX consumers_drained ON queen.consumers (partition_id) WHERE ready_at IS NULL;

-- The cursor and the lease of a consumer. A transition inserts generation n + 1 and deletes n, by their keys; the
-- primary key lets only one of two transitions from the same state through, whatever isolation they run in.
CREATE TABLE queen.consumer_states (
    consumer_id bigint NOT NULL,
    gen bigint NOT NULL,
    -- Everything up to the cursor is settled; ahead holds what was settled beyond it.
    cursor bigint NOT NULL,
    ahead int8multirange NOT NULL DEFAULT '{}',
    -- Up to here messages were in a batch whose consumer died: delivered one at a time, so that only the poison stays.
    suspect_through bigint NOT NULL DEFAULT 0,
    -- How many rows of redeliveries this consumer has: none, and the ordinary path does not look.
    redelivering integer NOT NULL DEFAULT 0,
    -- The lease, while there is one: its token, what it still holds, and what of it was settled so far.
    lease_id uuid,
    lease_expires_at timestamptz,
    popped_at timestamptz,
    first_seq bigint,
    last_seq bigint,
    attempt integer NOT NULL DEFAULT 0,
    held int8multirange NOT NULL DEFAULT '{}',
    retry_at timestamptz,
    completed integer NOT NULL DEFAULT 0,
    failed integer NOT NULL DEFAULT 0,
    rejected integer NOT NULL DEFAULT 0,
    released integer NOT NULL DEFAULT 0,
    -- Over the consumer's life.
    total_completed bigint NOT NULL DEFAULT 0,
    total_dropped bigint NOT NULL DEFAULT 0,
    settled_at timestamptz,
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
    partition_id bigint NOT NULL,
    first_seq bigint NOT NULL,
    last_seq bigint NOT NULL,
    completed integer NOT NULL,
    failed integer NOT NULL,
    rejected integer NOT NULL,
    released integer NOT NULL,
    expired integer NOT NULL,
    attempt integer NOT NULL,
    priority smallint NOT NULL,
    popped_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL,
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
    partition_id bigint NOT NULL REFERENCES queen.partitions (id),
    seq bigint NOT NULL,
    message_id uuid NOT NULL,
    consumer_group text NOT NULL,
    partition_name text NOT NULL,
    priority smallint NOT NULL,
    transaction_id text NOT NULL,
    trace_id uuid,
    payload json NOT NULL,
    is_encrypted boolean NOT NULL,
    reason text NOT NULL CHECK (reason IN ('failed', 'rejected', 'expired', 'evicted')),
    error_message text,
    retry_count integer NOT NULL,
    original_created_at timestamptz NOT NULL,
    failed_at timestamptz NOT NULL,
    requeued_at timestamptz,
    requeued_seq bigint
);
CREATE INDEX dead_letter_queue_queue ON queen.dead_letter_queue (queue_id, id);
CREATE INDEX dead_letter_queue_waiting ON queen.dead_letter_queue (queue_id, consumer_group, id)
WHERE requeued_at IS NULL;
CREATE INDEX dead_letter_queue_trace ON queen.dead_letter_queue (trace_id) WHERE trace_id IS NOT NULL;

CREATE TABLE queen.retention_history (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue_name text NOT NULL,
    partition_name text NOT NULL,
    partition_id bigint NOT NULL,
    retention_type text NOT NULL CHECK (retention_type IN ('retention', 'completed', 'evicted')),
    messages_deleted bigint NOT NULL,
    first_seq bigint NOT NULL,
    last_seq bigint NOT NULL,
    executed_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX retention_history_executed_at ON queen.retention_history (executed_at);

CREATE TABLE queen.queue_metrics (
    queue_name text NOT NULL,
    consumer_group text NOT NULL,
    bucket_start timestamptz NOT NULL,
    bucket_seconds integer NOT NULL,
    pushed bigint NOT NULL DEFAULT 0,
    completed bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    dead_lettered bigint NOT NULL DEFAULT 0,
    latency_p50_ms double precision,
    latency_p95_ms double precision,
    latency_p99_ms double precision,
    processing_p50_ms double precision,
    processing_p95_ms double precision,
    processing_p99_ms double precision,
    pending bigint,
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
