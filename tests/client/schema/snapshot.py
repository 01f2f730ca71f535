"""What a schema consists of, as text to compare."""

from __future__ import annotations

from typing import Any

import psycopg

from airflow_provider_queen.client.schema import current_version

# Everything that a migration may make, as text, without numbers that differ from one run to the next.
SNAPSHOT = """
    SELECT format('column %s.%s %s %s %s', c.relname, a.attname, a.atttypid::regtype, a.attnotnull,
                  pg_get_expr(d.adbin, d.adrelid))
    FROM pg_attribute AS a
    JOIN pg_class AS c ON c.oid = a.attrelid
    LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE c.relnamespace = to_regnamespace('queen') AND a.attnum > 0 AND NOT a.attisdropped
    UNION ALL
    SELECT format('relation %s %s %s %s', relkind, relname, relacl, obj_description(oid, 'pg_class'))
    FROM pg_class WHERE relnamespace = to_regnamespace('queen')
    UNION ALL
    SELECT format('view %s %s', oid::regclass, pg_get_viewdef(oid))
    FROM pg_class WHERE relnamespace = to_regnamespace('queen') AND relkind = 'v'
    UNION ALL
    SELECT format('routine %s %s', pg_get_functiondef(oid), proacl)
    FROM pg_proc WHERE pronamespace = to_regnamespace('queen')
    UNION ALL
    SELECT format('constraint %s %s', conname, pg_get_constraintdef(oid))
    FROM pg_constraint WHERE connamespace = to_regnamespace('queen')
    UNION ALL
    SELECT format('schema %s %s', nspname, nspacl) FROM pg_namespace WHERE nspname = 'queen'
    ORDER BY 1
"""
RECORDED = """
    SELECT 'version ' || version_num FROM queen.alembic_version
    UNION ALL
    SELECT name || ' ' || checksum FROM queen.schema_objects
    ORDER BY 1
"""


def snapshot(connection: psycopg.Connection[Any]) -> list[str]:
    rows = connection.execute(SNAPSHOT).fetchall()
    if current_version(connection) is not None:
        rows += connection.execute(RECORDED).fetchall()
    return [row[0] for row in rows]
