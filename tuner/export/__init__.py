"""Export of built artifacts to other languages. Enter by `c_export.export_c`."""
