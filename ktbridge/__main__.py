"""``python -m ktbridge`` is the ``ktbridge`` command."""

from ktbridge.cli import main

if __name__ == "__main__":
    main(prog_name="ktbridge")
