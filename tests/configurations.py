"""Training configurations for tests."""

import yaml

GOOD = {"model_name_or_path": "base", "dataset": "rows.jsonl", "output_dir": "out"}


def notes_of(config):
    """{key: problem} of what was noted."""
    assert all(note.severity == "warning" and note.next_step for note in config.notes)
    return {note.where.rpartition(": ")[2]: note for note in config.notes}


def written(directory, **values):
    """A configuration file with the dataset it names."""
    (directory / "rows.jsonl").write_text('{"messages": []}\n')
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump({**GOOD, **values}))
    return path
