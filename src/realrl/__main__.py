"""`python -m realrl` and the `realrl` command."""

import sys

from realrl.cli.app import run_app


def main() -> None:
    """Run the command line of this process and exit with its status."""
    sys.exit(run_app(sys.argv[1:]))


if __name__ == "__main__":
    main()
