-- The tables of Queen v2, as people have them: a database that has them is found at this revision.
-- A new database passes by; the way back brings them, with what is in the present tables.
CREATE TABLE queen.queues (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    name varchar(255) UNIQUE NOT NULL,
    namespace varchar(255),
    task varchar(255),
    priority integer DEFAULT 0,
    lease_time integer DEFAULT 300,
    retry_limit integer DEFAULT 3,
    retry_delay integer DEFAULT 1000,
    max_size integer DEFAULT 10000,
    ttl integer DEFAULT 3600,
    dead_letter_queue boolean DEFAULT FALSE,
    dlq_after_max_retries boolean DEFAULT FALSE,
    delayed_processing integer DEFAULT 0,
    window_buffer integer DEFAULT 0,
    retention_seconds integer DEFAULT 0,
    completed_retention_seconds integer DEFAULT 0,
    retention_enabled boolean DEFAULT FALSE,
    encryption_enabled boolean DEFAULT FALSE,
    max_wait_time_seconds integer DEFAULT 0,
    max_queue_size integer DEFAULT 0,
    created_at timestamptz DEFAULT now()
);
CREATE INDEX idx_queues_priority ON queen.queues (priority DESC);
CREATE INDEX idx_queues_namespace ON queen.queues (namespace) WHERE namespace IS NOT NULL;
CREATE INDEX idx_queues_task ON queen.queues (task) WHERE task IS NOT NULL;

CREATE TABLE queen.partitions (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    queue_id uuid REFERENCES queen.queues (id) ON DELETE CASCADE,
    name varchar(255) NOT NULL DEFAULT 'Default',
    created_at timestamptz DEFAULT now(),
    last_activity timestamptz DEFAULT now(),
    UNIQUE (queue_id, name)
);
CREATE INDEX idx_partitions_last_activity ON queen.partitions (last_activity);

CREATE TABLE queen.messages (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    transaction_id varchar(255) UNIQUE NOT NULL,
    trace_id uuid DEFAULT gen_random_uuid(),
    partition_id uuid REFERENCES queen.partitions (id) ON DELETE CASCADE,
    payload jsonb NOT NULL,
    created_at timestamptz DEFAULT now(),
    is_encrypted boolean DEFAULT FALSE
);
CREATE INDEX idx_messages_partition_created_id ON queen.messages (partition_id, created_at, id);
CREATE INDEX idx_messages_trace_id ON queen.messages (trace_id);
CREATE INDEX idx_messages_created_at ON queen.messages (created_at);

CREATE TABLE queen.messages_status (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    message_id uuid REFERENCES queen.messages (id) ON DELETE CASCADE,
    consumer_group varchar(255),
    status varchar(20) DEFAULT 'pending',
    worker_id varchar(255),
    locked_at timestamptz,
    completed_at timestamptz,
    failed_at timestamptz,
    error_message text,
    retry_count integer DEFAULT 0,
    lease_expires_at timestamptz,
    processing_at timestamptz,
    created_at timestamptz DEFAULT now(),
    UNIQUE (message_id, consumer_group)
);
CREATE INDEX idx_messages_status_group ON queen.messages_status (consumer_group, status);

CREATE TABLE queen.partition_cursors (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    partition_id uuid REFERENCES queen.partitions (id) ON DELETE CASCADE,
    consumer_group varchar(255) DEFAULT '__QUEUE_MODE__',
    last_consumed_created_at timestamptz,
    last_consumed_id uuid,
    total_messages_consumed bigint DEFAULT 0,
    total_batches_consumed bigint DEFAULT 0,
    last_consumed_at timestamptz,
    created_at timestamptz DEFAULT now(),
    UNIQUE (partition_id, consumer_group)
);

CREATE TABLE queen.partition_leases (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    partition_id uuid REFERENCES queen.partitions (id) ON DELETE CASCADE,
    consumer_group varchar(255) DEFAULT '__QUEUE_MODE__',
    lease_expires_at timestamptz NOT NULL,
    message_batch jsonb,
    batch_size integer DEFAULT 0,
    acked_count integer DEFAULT 0,
    created_at timestamptz DEFAULT now(),
    released_at timestamptz,
    UNIQUE (partition_id, consumer_group)
);
CREATE INDEX idx_partition_leases_expires ON queen.partition_leases (lease_expires_at) WHERE released_at IS NULL;

CREATE TABLE queen.consumer_groups (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    queue_id uuid REFERENCES queen.queues (id) ON DELETE CASCADE,
    name varchar(255) NOT NULL,
    created_at timestamptz DEFAULT now(),
    subscription_start_from timestamptz,
    active boolean DEFAULT TRUE,
    last_seen_at timestamptz,
    UNIQUE (queue_id, name)
);

CREATE TABLE queen.dead_letter_queue (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    message_id uuid REFERENCES queen.messages (id) ON DELETE CASCADE,
    partition_id uuid REFERENCES queen.partitions (id) ON DELETE CASCADE,
    consumer_group varchar(255),
    error_message text,
    retry_count integer DEFAULT 0,
    original_created_at timestamptz,
    failed_at timestamptz DEFAULT now()
);
CREATE INDEX idx_dlq_partition ON queen.dead_letter_queue (partition_id);
CREATE INDEX idx_dlq_message_consumer ON queen.dead_letter_queue (message_id, consumer_group);

CREATE TABLE queen.retention_history (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    partition_id uuid REFERENCES queen.partitions (id) ON DELETE CASCADE,
    messages_deleted integer DEFAULT 0,
    retention_type varchar(50),
    executed_at timestamptz DEFAULT now()
);
CREATE INDEX idx_retention_history_partition ON queen.retention_history (partition_id);

CREATE FUNCTION queen.update_partition_last_activity()
RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    UPDATE queen.partitions SET last_activity = now() WHERE id = new.partition_id;
    RETURN new;
END
$$;
CREATE TRIGGER trigger_update_partition_activity
AFTER INSERT ON queen.messages
FOR EACH ROW EXECUTE FUNCTION queen.update_partition_last_activity();
