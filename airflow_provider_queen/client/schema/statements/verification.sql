-- What was compared when v2 was migrated, before it was committed: a row for each queue and group.
SELECT v.queue_name, v.consumer_group, v.messages, v.checksum::text, v.pending_in_v2, v.pending
FROM queen_v2.verification AS v
ORDER BY v.queue_name, v.consumer_group;
