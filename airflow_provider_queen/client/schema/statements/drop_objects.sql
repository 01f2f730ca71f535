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
