-- Ends an expansion that has not come to its cutover: v2 is as it was before.
DROP TRIGGER IF EXISTS queen_v2_inserted ON queen.messages;
DROP TRIGGER IF EXISTS queen_v2_deleted ON queen.messages;
DROP TRIGGER IF EXISTS queen_v2_updated ON queen.messages;
DROP SCHEMA IF EXISTS queen_next CASCADE;
DROP SCHEMA IF EXISTS queen_v2 CASCADE;
