-- What must hold before a migration starts, in one row. Only catalogs: there may be no schema yet, or another one.
SELECT
    current_setting('server_version') AS server_version,
    current_setting('server_version_num')::integer AS server_version_num,
    pg_catalog.pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean AS read_only,
    coalesce(
        (
            SELECT pg_catalog.has_schema_privilege(n.oid, 'CREATE')
            FROM pg_catalog.pg_namespace AS n
            WHERE n.nspname = 'queen'
        ),
        pg_catalog.has_database_privilege(current_database(), 'CREATE')
    ) AS may_create,
    -- Views and functions are dropped and made again: that takes their owner, or a member of its role.
    (
        SELECT coalesce(array_agg(DISTINCT pg_catalog.pg_get_userbyid(o.owner)::text), '{}')
        FROM (
            SELECT
                c.relowner AS owner,
                c.relnamespace AS namespace
            FROM pg_catalog.pg_class AS c
            UNION ALL
            SELECT
                p.proowner AS owner,
                p.pronamespace AS namespace
            FROM pg_catalog.pg_proc AS p
        ) AS o
        WHERE o.namespace = pg_catalog.to_regnamespace('queen') AND NOT pg_catalog.pg_has_role(o.owner, 'USAGE')
    ) AS other_owners,
    EXISTS (
        SELECT 1 FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = pg_catalog.to_regclass('queen.partition_consumers') AND a.attname = 'lease_expires_at'
    ) AS has_leases,
    (
        SELECT coalesce(sum(pg_catalog.pg_total_relation_size(c.oid)), 0)::bigint
        FROM pg_catalog.pg_class AS c
        WHERE c.relnamespace = pg_catalog.to_regnamespace('queen') AND c.relkind IN ('r', 'm')
    ) AS schema_bytes;
