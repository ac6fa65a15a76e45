"""What tests say of findings: codes and places. A sentence is asserted only where it is what is tested."""


def codes(found, severity=None):
    """The codes of problems: a list of them (or of their JSON), an error or report that has some, or what
    pytest.raises caught; of one severity where given."""
    return {one["code"] for one in _rows(found) if severity in (None, one["severity"])}


def placed(found):
    """(code, where) of each problem, in order."""
    return [(one["code"], one["where"]) for one in _rows(found)]


def _rows(found):
    found = getattr(found, "value", found)  # what pytest.raises caught
    problems = getattr(found, "problems", found)
    return [one if isinstance(one, dict) else one.as_dict() for one in problems]
