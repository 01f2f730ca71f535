-- Version and checksums in one statement; fails where the schema is missing or may not be read.
SELECT
    (SELECT string_agg(v.version_num, ', ') FROM queen.alembic_version AS v) AS version,
    (SELECT json_object_agg(o.name, o.checksum) FROM queen.schema_objects AS o) AS objects;
