"""SQL that makes the roles of a database on a PostgreSQL server, from the tables of the newest schema."""

from __future__ import annotations

from relax_tune.database.models import Base

READER, TUNER, ADMIN = "relax_reader", "relax_tuner", "relax_admin"
_KEPT = ("about", "unreadable")
"""Tables that a migration writes."""
_UPDATED = ("tallies", "plans", "jobs", "leases", "histograms", "submitted_jobs")


def role_script() -> str:
    """Return the statements. They may be run again, and name no database and no user.

    A reader builds and looks. A tuner adds records, plans and submitted jobs, and changes and removes no measurement. An admin owns
    the tables: prunes, imports, upgrades.
    """
    tables = sorted(Base.metadata.tables)
    added = ", ".join(name for name in tables if name not in _KEPT)
    all_roles = f"{READER}, {TUNER}, {ADMIN}"
    made = [
        f"DO $$ BEGIN CREATE ROLE {role}; EXCEPTION WHEN duplicate_object THEN NULL; END $$;"
        for role in (READER, TUNER, ADMIN)
    ]
    return "\n".join(
        [
            "-- Run as the owner of the tables, again after each `relax-tune db upgrade`; then GRANT relax_tuner TO tina;",
            *made,
            f"GRANT USAGE ON SCHEMA public TO {all_roles};",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {all_roles};",
            f"GRANT INSERT ON {added} TO {TUNER};",
            f"GRANT UPDATE ON {', '.join(_UPDATED)} TO {TUNER};",
            f"GRANT UPDATE (limits, reference) ON targets TO {TUNER};",
            f"GRANT DELETE ON leases TO {TUNER};",
            f"GRANT CREATE ON SCHEMA public TO {ADMIN};",
            *(f"ALTER TABLE {name} OWNER TO {ADMIN};" for name in (*tables, "alembic_version")),
            "",
        ]
    )
