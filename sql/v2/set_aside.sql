-- The way back to v2, first part: nobody works with the present tables any more; they make room for v2's.
CREATE SCHEMA queen_next;
SELECT queen_v2.move_tables('queen', 'queen_next');
DO $$
BEGIN
    -- Where v2's tables were dropped, or never were: empty ones to look things up in.
    IF to_regclass('queen_v2.messages') IS NULL THEN
        CREATE TABLE queen_v2.queues (
            id uuid, max_size integer, ttl integer, dead_letter_queue boolean, dlq_after_max_retries boolean
        );
        CREATE TABLE queen_v2.partitions (id uuid, last_activity timestamptz);
        CREATE TABLE queen_v2.messages (id uuid, partition_id uuid, created_at timestamptz);
        CREATE TABLE queen_v2.messages_status (
            id uuid, message_id uuid, consumer_group text, status text, worker_id text, locked_at timestamptz,
            completed_at timestamptz, failed_at timestamptz, error_message text, retry_count integer,
            processing_at timestamptz, created_at timestamptz
        );
        CREATE TABLE queen_v2.consumer_groups (
            id uuid, queue_id uuid, name text, created_at timestamptz, active boolean, last_seen_at timestamptz
        );
    END IF;
END
$$;
