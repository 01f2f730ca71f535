-- Version and checksums in one statement; fails where the schema is missing or may not be read.
-- As text, because how a session reads JSON is its own affair.
SELECT
    (SELECT string_agg(v.version_num, ', ') FROM queen.alembic_version AS v) AS version,
    (SELECT json_object_agg(o.name, o.checksum)::text FROM queen.schema_objects AS o) AS objects;
