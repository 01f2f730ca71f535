-- Removes v2's tables, with every message.
DROP TABLE IF EXISTS
queen.messages_status, queen.partition_cursors, queen.partition_leases, queen.consumer_groups, queen.dead_letter_queue,
queen.retention_history, queen.messages, queen.partitions, queen.queues;
DROP FUNCTION IF EXISTS queen.update_partition_last_activity();
DROP SCHEMA IF EXISTS queen_next CASCADE;
DROP SCHEMA IF EXISTS queen_v2 CASCADE;
