"""`python -m kvgen`."""

from kvgen.cli import main_entry

main_entry()
