-- v2's order of messages; the copy walks along it. v2 has it under this name, unless somebody dropped it.
CREATE INDEX CONCURRENTLY IF NOT EXISTS idx_messages_partition_created_id
ON queen.messages (partition_id, created_at, id);
