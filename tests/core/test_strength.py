"""The order of strengths is what a plan's demand is compared with."""

import pytest

from cotenant.core.strength import Strength


@pytest.mark.parametrize(
    ("kept_by", "demanded", "enough"),
    [
        (Strength.KERNEL, Strength.DRIVER, True),
        (Strength.DRIVER, Strength.DRIVER, True),
        (Strength.SERVER, Strength.DRIVER, False),
        (Strength.SHIM, Strength.SERVER, False),
        (Strength.NOTHING, Strength.SHIM, False),
        (Strength.NOTHING, Strength.NOTHING, True),
    ],
)
def test_a_demand_is_met_by_the_same_strength_or_a_stronger_one(kept_by, demanded, enough):
    assert kept_by.at_least(demanded) is enough
