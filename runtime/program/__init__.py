"""Built programs, host programs and plans as plain data: verified, serialised, evaluated. Any module may be imported."""
