"""A layout has one name, which can be parsed back into the layout."""

import random

import pytest

from cleanba.record.layout import Layout


def random_layout(rng: random.Random) -> Layout:
    def ids() -> tuple[int, ...]:
        return tuple(rng.sample(range(200), rng.randint(1, 8)))

    return Layout(ids(), ids(), rng.randint(1, 1000), rng.choice([None, rng.randint(1, 300)]))


def test_parsing_the_name_of_any_layout_returns_the_layout():
    rng = random.Random(0)
    layouts = [random_layout(rng) for _ in range(1000)]
    for layout in layouts:
        assert Layout.parse(layout.name) == layout
    assert len({layout.name for layout in layouts}) == len(set(layouts))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("a0-l1,2-d1-t2", Layout((0,), (1, 2), 1, 2)),  # a trainer
        ("a0-l1,2,3,4,5,6-d1", Layout((0,), (1, 2, 3, 4, 5, 6), 1)),  # Cleanba's README
        ("a0,1-l0,1-d2-t1", Layout((0, 1), (0, 1), 2, 1)),
    ],
)
def test_names_are_spelled_as_in_the_readme_of_cleanba(name, layout):
    assert Layout.parse(name) == layout
    assert layout.name == name


@pytest.mark.parametrize(
    "name",
    [
        "", "a0", "a0-l", "a0-l0", "l0-a0-d1", "a0-l0-d0", "a0-l0-d1-t0", "a0-l0-t2-d1", "a0-l0-d01",
        "a0,0-l0-d1", "a0-l0-d1-t2-c1", "a0-l0-d1 ", "a\u0660-l0-d1", "base",
    ],
)  # fmt: skip
def test_what_is_not_a_layout_is_refused_in_one_line(name):
    with pytest.raises(ValueError, match="not a layout") as caught:
        Layout.parse(name)
    assert "\n" not in str(caught.value)


def test_a_layout_that_cannot_be_is_not_made():
    for wrong in ({"actors": ()}, {"learners": (1, 1)}, {"learners": (-1,)}, {"processes": 0}):
        with pytest.raises(ValueError, match=r"device ids|at least one"):
            Layout(**wrong)
