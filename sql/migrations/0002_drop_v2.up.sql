-- optional: drops v2's tables, which an upgrade has kept in the schema queen_v2. The queue works with and without them.
DROP SCHEMA IF EXISTS queen_v2 CASCADE;
