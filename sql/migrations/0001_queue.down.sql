-- Functions and views were dropped by the runner before this.
DROP TABLE
queen.anomalies, queen.queue_metrics, queen.retention_history, queen.dead_letter_queue, queen.deliveries,
queen.redeliveries, queen.consumer_states, queen.consumers, queen.queue_groups, queen.consumer_groups_metadata,
queen.message_log, queen.lanes, queen.partitions, queen.queues;
DROP TYPE
queen.popped_message, queen.pushed_batch, queen.settlement, queen.lane_tail, queen.lease_expiry, queen.partition_stats,
queen.group_summary,
queen.dead_letter, queen.requeued_message, queen.eviction, queen.retained_partition;
