"""Which of a test's cases --cases leaves (conftest.py)."""


def cases_of(items, first: int, step: int) -> set:
    """Every `step`-th case of each test, and one at least."""
    tests = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return {case for of in tests.values() for case in of[first % min(step, len(of)) :: step]}
