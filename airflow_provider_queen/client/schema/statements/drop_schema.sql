-- The end of a downgrade to base. No CASCADE: what a down script forgot, or somebody else put here, stops it.
DROP TABLE queen.schema_objects;
DROP TABLE queen.alembic_version;
DROP SCHEMA queen;
