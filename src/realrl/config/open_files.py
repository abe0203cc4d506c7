"""Number of files and connections that a process may have open."""

from contextlib import suppress

_MOST = 1 << 16


def raise_limit_of_open_files() -> None:
    """Raise the soft limit of open files as far as the system allows. The default is often only 1024."""
    with suppress(ImportError, OSError, ValueError):  # not on Windows; the system may refuse
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
