"""Well-formedness, structural equality and validation of untrusted text. Any module may be imported from outside."""
