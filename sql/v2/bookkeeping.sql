-- What became of v2's rows: made by an expansion, used by the way back, dropped together with v2's tables.
CREATE SCHEMA IF NOT EXISTS queen_v2;

CREATE TABLE IF NOT EXISTS queen_v2.queue_map (
    v2_id uuid PRIMARY KEY,
    id integer NOT NULL UNIQUE
);

CREATE TABLE IF NOT EXISTS queen_v2.partition_map (
    v2_id uuid PRIMARY KEY,
    id bigint NOT NULL UNIQUE,
    -- How far its messages are copied: the place of the last one in v2's order, and its seq.
    last_created_at timestamptz,
    last_id uuid,
    copied bigint NOT NULL DEFAULT 0,
    -- How far the copy was read back and found equal, and the sum of what was read on either side.
    verified bigint NOT NULL DEFAULT 0,
    checksum numeric NOT NULL DEFAULT 0,
    -- A message came in between, or was deleted, since the consumers were copied: theirs are computed again.
    is_rewound boolean NOT NULL DEFAULT FALSE
);

CREATE TABLE IF NOT EXISTS queen_v2.message_map (
    v2_id uuid PRIMARY KEY,
    lane_id bigint NOT NULL,
    seq bigint NOT NULL,
    UNIQUE (lane_id, seq)
);

-- As queen.message_id, which is not there while tables are exchanged.
CREATE OR REPLACE FUNCTION queen_v2.address(lane_id bigint, seq bigint)
RETURNS uuid
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT (lpad(to_hex(lane_id), 12, '0') || '80008' || lpad(to_hex(seq), 15, '0'))::uuid;
$$;

-- The present tables and types from one schema to another; what records the version stays where it is.
CREATE OR REPLACE FUNCTION queen_v2.move_tables(from_schema regnamespace, to_schema regnamespace)
RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    moving record;
BEGIN
    FOR moving IN
        SELECT CASE c.relkind WHEN 'r' THEN 'TABLE' ELSE 'TYPE' END AS kind, c.relname AS name
        FROM pg_class AS c
        WHERE
            c.relnamespace = from_schema AND c.relkind IN ('r', 'c')
            AND c.relname NOT IN ('alembic_version', 'schema_objects')
        ORDER BY c.relkind DESC, c.relname
    LOOP
        EXECUTE format('ALTER %s %s.%I SET SCHEMA %s', moving.kind, from_schema, moving.name, to_schema);
    END LOOP;
END
$$;
