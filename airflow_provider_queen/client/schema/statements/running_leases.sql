-- Leases that somebody works under at this moment.
SELECT count(*) AS running FROM queen.partition_consumers AS c WHERE c.lease_expires_at > clock_timestamp();
