"""SQL that makes the roles of a database on a PostgreSQL server, from the tables of the schema.

Tests: `tests/database/test_transport.py`.
"""

from __future__ import annotations

from relax_tune.database.schema import TABLES

READER, TUNER, ADMIN = "relax_reader", "relax_tuner", "relax_admin"
_MIGRATED = ("about",)
"""Tables that only a migration writes."""
_UPDATED = ("tallies", "plans", "jobs", "leases", "histograms", "submitted_jobs")


def role_script() -> str:
    """Return the statements as a script."""
    advice = (
        "-- Run as the owner of the tables, again after each `relax-tune db upgrade`; then GRANT relax_tuner TO tina;"
    )
    return "\n".join([advice, *role_statements(), ""])


def role_statements() -> list[str]:
    """Return the statements. They may be run again, and name no database and no user.

    A reader builds and inspects. A tuner also adds records, plans and submitted jobs, but cannot change or remove a measurement.
    An admin owns the tables: it prunes, imports and upgrades.
    """
    tables = sorted(TABLES)
    added = ", ".join(name for name in tables if name not in _MIGRATED)
    all_roles = f"{READER}, {TUNER}, {ADMIN}"
    creations = [
        f"DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{role}') THEN CREATE ROLE {role}; END IF; END $$;"
        for role in (READER, TUNER, ADMIN)
    ]
    joined = (  # the owner of the tables has to be a member to give them to the role
        f"DO $$ BEGIN IF NOT pg_has_role(current_user, '{ADMIN}', 'MEMBER') "
        f"THEN EXECUTE 'GRANT {ADMIN} TO ' || quote_ident(current_user); END IF; END $$;"
    )
    return [
        *creations,
        joined,
        f"GRANT USAGE ON SCHEMA public TO {all_roles};",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {all_roles};",
        f"GRANT INSERT ON {added} TO {TUNER};",
        f"GRANT UPDATE ON {', '.join(_UPDATED)} TO {TUNER};",
        # A later job fills in what the first one did not know about a target; its key depends on neither.
        f"GRANT UPDATE (limits, reference) ON targets TO {TUNER};",
        f"GRANT DELETE ON leases TO {TUNER};",
        f"GRANT CREATE ON SCHEMA public TO {ADMIN};",
        *(f"ALTER TABLE {name} OWNER TO {ADMIN};" for name in (*tables, "alembic_version")),
    ]
