-- Before they go: what was granted on views and routines, for restore_grants.sql. In a setting of this transaction,
-- because a temporary table would need a right that not every role has. Of PUBLIC's right to execute, which every new
-- routine has, only the absence is kept: a release that takes it away must not get it back from here.
SELECT pg_catalog.set_config('queen_schema.grants', coalesce(pg_catalog.jsonb_agg(g)::text, '[]'), TRUE)
FROM (
    SELECT
        'view' AS kind,
        c.oid::pg_catalog.regclass::text AS name,
        pg_catalog.format(
            'GRANT %s ON %s TO %s %s',
            a.privilege_type, c.oid::pg_catalog.regclass,
            CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::pg_catalog.regrole::text END,
            CASE WHEN a.is_grantable THEN 'WITH GRANT OPTION' END
        ) AS statement
    FROM pg_catalog.pg_class AS c
    CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) AS a
    WHERE c.relnamespace = 'queen'::pg_catalog.regnamespace AND c.relkind = 'v' AND a.grantee <> c.relowner
    UNION ALL
    SELECT
        'routine' AS kind,
        p.oid::pg_catalog.regprocedure::text AS name,
        pg_catalog.format(
            'GRANT EXECUTE ON ROUTINE %s TO %s %s',
            p.oid::pg_catalog.regprocedure, a.grantee::pg_catalog.regrole,
            CASE WHEN a.is_grantable THEN 'WITH GRANT OPTION' END
        ) AS statement
    FROM pg_catalog.pg_proc AS p
    CROSS JOIN LATERAL pg_catalog.aclexplode(p.proacl) AS a
    WHERE p.pronamespace = 'queen'::pg_catalog.regnamespace AND a.grantee NOT IN (0, p.proowner)
    UNION ALL
    SELECT
        'routine' AS kind,
        p.oid::pg_catalog.regprocedure::text AS name,
        pg_catalog.format('REVOKE EXECUTE ON ROUTINE %s FROM PUBLIC', p.oid::pg_catalog.regprocedure) AS statement
    FROM pg_catalog.pg_proc AS p
    WHERE
        p.pronamespace = 'queen'::pg_catalog.regnamespace
        AND p.proacl IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM pg_catalog.aclexplode(p.proacl) AS a WHERE a.grantee = 0)
) AS g;

-- Drops every view and routine of the schema, so that nothing stale outlives its file and no view blocks ALTER TABLE.
-- Never CASCADE: that could take along what somebody built on our views. Views and routines may use each other in
-- either direction, so the loop drops whatever nothing uses any more until none is left or none can be dropped.
DO $drop$
DECLARE
    statement text;
    dropped boolean;
    blocked boolean;
    blocker text;
BEGIN
    LOOP
        dropped := false;
        blocked := false;
        FOR statement IN
            SELECT pg_catalog.format('DROP VIEW %s', c.oid::pg_catalog.regclass)
            FROM pg_catalog.pg_class AS c
            WHERE c.relnamespace = 'queen'::pg_catalog.regnamespace AND c.relkind = 'v'
            UNION ALL
            SELECT pg_catalog.format('DROP ROUTINE %s', p.oid::pg_catalog.regprocedure)
            FROM pg_catalog.pg_proc AS p
            WHERE p.pronamespace = 'queen'::pg_catalog.regnamespace
        LOOP
            BEGIN
                EXECUTE statement;
                dropped := true;
            EXCEPTION WHEN dependent_objects_still_exist THEN
                blocked := true;
                GET STACKED DIAGNOSTICS blocker = PG_EXCEPTION_DETAIL;
            END;
        END LOOP;
        EXIT WHEN NOT blocked;
        IF NOT dropped THEN
            RAISE EXCEPTION 'something else depends on views or functions of the schema queen'
                USING ERRCODE = 'dependent_objects_still_exist',
                      DETAIL = blocker,
                      HINT = 'Drop it, migrate, and create it again; better build on the tables.';
        END IF;
    END LOOP;
    DELETE FROM queen.schema_objects;
END
$drop$;
