"""Programs that makers of this repository run and users do not: none of it is in the wheel."""
