-- Functions and views were dropped by the runner before this.
DROP TABLE
queen.anomalies, queen.queue_metrics, queen.retention_history, queen.dead_letter_queue, queen.deliveries,
queen.redeliveries, queen.consumer_states, queen.consumers, queen.consumer_groups_metadata, queen.message_log,
queen.partitions, queen.queues;
