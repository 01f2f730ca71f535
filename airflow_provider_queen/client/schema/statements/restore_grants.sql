-- What drop_objects.sql kept, for each view and routine that is there again under its name and argument types.
DO $restore$
DECLARE
    kept record;
BEGIN
    FOR kept IN
        SELECT g.kind, g.name, g.statement
        FROM pg_catalog.jsonb_to_recordset(pg_catalog.current_setting('queen_schema.grants')::pg_catalog.jsonb)
            AS g (kind text, name text, statement text)
    LOOP
        IF (kept.kind = 'view' AND pg_catalog.to_regclass(kept.name) IS NOT NULL)
            OR (kept.kind = 'routine' AND pg_catalog.to_regprocedure(kept.name) IS NOT NULL)
        THEN
            EXECUTE kept.statement;
        END IF;
    END LOOP;
END
$restore$;
