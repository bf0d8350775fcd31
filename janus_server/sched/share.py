"""How the tokens of a step are split over the prompts that wait to be computed. Pure; the batcher calls it once a step.

Equal shares, by water filling: a short prompt is never cut for a long one's sake, and nothing of the budget is left
while somebody could use it.
"""

from __future__ import annotations

from collections.abc import Sequence


def share(gaps: Sequence[int], budget: int) -> list[int]:
    """Split a token budget over prompts, equal shares, what short ones leave going to longer ones.

    Example: share([100, 1000, 1000], 513) == [100, 207, 206]. Earlier prompts get the remainder.
    """
    left = budget
    level = 0
    for place, gap in enumerate(sorted(gaps)):
        level, extra = divmod(left, len(gaps) - place)
        if gap > level:
            break
        left -= gap
    else:
        return list(gaps)
    shares = [min(gap, level) for gap in gaps]
    for i, gap in enumerate(gaps):
        if extra and gap > level:
            shares[i] += 1
            extra -= 1
    return shares
