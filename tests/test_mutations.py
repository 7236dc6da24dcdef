"""The list of changes that tests must notice stays applicable to the code."""

from tests.mutations.__main__ import ROOT, read


def test_every_change_of_the_list_applies_to_one_place():
    stale = [m for m in read() if (ROOT / m.file).read_text().count(m.old) != 1]
    assert [f"{m.file} {m.function}: {m.change}" for m in stale] == []
