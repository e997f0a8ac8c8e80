"""Exchange of records: `jsonl` (export, import, merge), `t4` and `t4_import` (results of other autotuners)."""
