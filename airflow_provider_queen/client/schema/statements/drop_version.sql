-- A schema without a revision has no version table: then a dry run may always create it.
DROP TABLE IF EXISTS queen.alembic_version;
