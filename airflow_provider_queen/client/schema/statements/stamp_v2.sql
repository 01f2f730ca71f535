-- v2 recorded no version: it gets one, in Alembic's own table.
CREATE TABLE IF NOT EXISTS queen.alembic_version (
    version_num varchar(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO queen.alembic_version (version_num)
SELECT '0000_v2' WHERE NOT EXISTS (SELECT 1 FROM queen.alembic_version);
