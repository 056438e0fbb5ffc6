"""The size of the house only falls: each number stays at or below its ceiling in ``tests/house.json``."""

from __future__ import annotations

from support.house import FILE, LIMITS, ceilings, exceptions, measure


def test_no_number_is_above_its_ceiling() -> None:
    numbers, faults = measure()
    above = {
        name: (numbers[name], ceiling)
        for name, ceiling in ceilings().items()
        if numbers[name] > ceiling
    }

    assert above == {}, {name: faults.get(name, "(number now, ceiling)") for name in above}


def test_every_number_has_a_ceiling_and_every_exception_its_number_and_its_reason() -> None:
    assert sorted(ceilings()) == sorted(LIMITS), f"each of LIMITS has its line in {FILE.name}"
    assert set(exceptions()) <= set(LIMITS)
    assert all(reason for names in exceptions().values() for reason in names.values())
