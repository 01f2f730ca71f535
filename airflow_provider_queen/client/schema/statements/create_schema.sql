-- What must exist before the first revision: the schema, and the checksums of the repeatable files.
-- CREATE SCHEMA IF NOT EXISTS asks for CREATE on the database even when the schema is there;
-- a role that was given a ready schema of its own need not have it.
DO $create$
BEGIN
    IF pg_catalog.to_regnamespace('queen') IS NULL THEN
        CREATE SCHEMA queen;
    END IF;
    IF pg_catalog.to_regclass('queen.schema_objects') IS NULL THEN
        CREATE TABLE queen.schema_objects (
            name text PRIMARY KEY,
            checksum text NOT NULL,
            applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
        );
        COMMENT ON TABLE queen.schema_objects IS 'Files of views and functions as last applied, with their SHA-256';
    END IF;
END
$create$;
