-- Messages with their names. partition_id is the lane's id, of which queen.message_log and queen.deliveries speak too.
-- The id is queen.message_id(lane_id, seq), written out: views are created before functions.
CREATE VIEW queen.messages AS
SELECT
    (lpad(to_hex(m.lane_id), 12, '0') || '80008' || lpad(to_hex(m.seq), 15, '0'))::uuid AS id,
    l.queue_id,
    q.name AS queue_name,
    l.name AS partition_name,
    m.lane_id,
    m.lane_id / 10 AS partition_id,
    l.priority,
    m.seq,
    m.transaction_id,
    m.trace_id,
    m.payload,
    m.is_encrypted,
    m.origin_transaction_id,
    m.requeued_from,
    m.created_at
FROM queen.message_log AS m
INNER JOIN queen.lanes AS l ON l.id = m.lane_id
INNER JOIN queen.queues AS q ON q.id = l.queue_id;
COMMENT ON VIEW queen.messages IS 'Every retained message, with the names of its queue and partition.';
