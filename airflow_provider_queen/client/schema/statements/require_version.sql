-- A script that was written for one version must not run on another.
DO $require$
BEGIN
    IF (SELECT array_agg(v.version_num::text) FROM queen.alembic_version AS v) IS DISTINCT FROM ARRAY[{version}] THEN
        RAISE EXCEPTION 'this script is for version % of the schema queen', {version};
    END IF;
END
$require$;
