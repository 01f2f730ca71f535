-- The tables that v2 had and nobody else has. Only the catalog: it may be somebody's schema who lets nobody read.
SELECT
    to_regclass('queen.messages_status') IS NOT NULL
    AND to_regclass('queen.partition_cursors') IS NOT NULL
    AND to_regclass('queen.alembic_version') IS NULL;
