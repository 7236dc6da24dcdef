"""What all benchmarks do with their cases and results."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from cleanba.command_line import BadInput


def check_cases(names: Collection[str], known: Collection[str]) -> None:
    """Refuse cases that there are not.

    Raises:
      BadInput: with one line.
    """
    for name in names:
        if name not in known:
            raise BadInput(f"--cases {name}: choose from {', '.join(known)}")


def write_results(path: str | None, results: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write results as JSON, if a path is given, and say so."""
    if path is None:
        return
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written: {file}")
