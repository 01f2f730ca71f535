-- For a cutover that met somebody who deletes messages: producers stop first, and wait while what consumers did is
-- copied.
SET LOCAL lock_timeout = '3s';
LOCK TABLE queen.messages, queen.partitions, queen.queues IN ACCESS EXCLUSIVE MODE;
