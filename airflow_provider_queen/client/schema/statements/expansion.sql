-- How far an expansion of v2 is: the checksum of the tables it was begun for, or NULL where none was begun.
SELECT obj_description(to_regnamespace('queen_next')::oid, 'pg_namespace') AS checksum;
