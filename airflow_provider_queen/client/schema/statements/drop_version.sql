-- A schema without a revision has neither table: then a dry run may always create them.
DROP TABLE IF EXISTS queen.alembic_version;
DROP TABLE IF EXISTS queen.schema_objects;
