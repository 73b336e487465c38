"""The command `outrider`, and `python -m outrider`."""

import sys

from outrider.errors import install, is_installed

_PACKAGES = ("click", "prompt_toolkit", "rich")  # of the extra [cli]


def main() -> None:
    """Run a command and exit, as `outrider.cli.main` says."""
    if missing := [name for name in _PACKAGES if not is_installed(name)]:
        sys.exit(f"outrider: The command line needs {', '.join(missing)}. Run: {install('cli')}")
    from outrider.cli import main as run

    run()


if __name__ == "__main__":
    main()
