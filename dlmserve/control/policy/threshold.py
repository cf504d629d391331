"""Which threshold a request gets: the highest one that its deadline and the cluster's load allow.

Pure array functions; a row is a request. Thresholds are indices into the descending list of candidates:
0 is the highest, `top` .. `bottom` what a request may get.

Sources: TeDiServe (arXiv 2606.29094), Algorithm 1 (`pick`) and Algorithm 2 (`greedy_caps`); `level_caps`
and `deadline_limits` are ours.
"""

import numpy as np

OPTIMISM = 0.7  # predictions err by up to 30%: what may take this share of the predicted steps can be saved


def pick(
    time_s: np.ndarray, slack_s: np.ndarray, top: np.ndarray, bottom: np.ndarray, savable: np.ndarray
) -> np.ndarray:
    """Algorithm 1: the highest threshold that ends in time. `time_s` [n, T]; all others [n]; -> int [n].

    Nothing below `top` in index (above it in threshold) is considered: the cap. Where no threshold ends in
    time, and where the request can't be saved, it is the lowest: such a request must not take capacity from
    those that can.
    """
    levels = np.arange(time_s.shape[1])
    fits = time_s <= slack_s[:, None]
    fits &= levels >= top[:, None]
    fits &= savable[:, None]
    fits[:, -1] = True  # as good as none
    return np.minimum(fits.argmax(axis=1), bottom).astype(int)


def greedy_caps(work: np.ndarray, top: np.ndarray, bottom: np.ndarray, supply: float) -> np.ndarray:
    """Algorithm 2: rows in order of service, `work` [n, T] -> the highest index each may use, int [n].

    Everybody is granted the lowest threshold; what supply is left is spent in order, each row taking the
    highest threshold that it pays for. In the paper's words: cap_r = the highest g with
    used + work_r(g) + (the lowest work of all behind r) <= supply.
    """
    rows = np.arange(len(work))
    caps = bottom.astype(int).copy()
    lowest = work[rows, caps]
    extra = work - lowest[:, None]
    left = supply - lowest.sum()
    cheapest = extra[rows, np.maximum(caps - 1, top.astype(int))]
    at = 0
    while at < len(work) and left >= 0:
        wanted = extra[rows[at:], top[at:].astype(int)]
        num_paid = int(np.searchsorted(np.cumsum(wanted), left, side="right"))
        caps[at : at + num_paid] = top[at : at + num_paid]
        left -= float(wanted[:num_paid].sum())
        at += num_paid
        if at == len(work):
            break
        affordable = np.flatnonzero(cheapest[at:] <= left)
        if not len(affordable):
            break
        at += int(affordable[0])
        options = np.arange(int(top[at]), caps[at] + 1)
        best = int(options[extra[at, options] <= left][0])
        left -= float(extra[at, best])
        caps[at] = best
        at += 1
    return caps


def deadline_limits(slack_s: np.ndarray, savable: np.ndarray, rate: float) -> np.ndarray:
    """How much work may be done until each row's deadline, float [n], for a supply of `rate` work per second.

    A row without a deadline, or one that is lost anyhow, sets no limit of its own: its work has to be done by
    the time of the latest deadline there is. Where all are lost, nothing is left to spend.
    """
    has_deadline = np.isfinite(slack_s)
    finite = savable & has_deadline
    if not finite.any():
        return np.full(len(slack_s), 0.0 if has_deadline.any() else np.inf)
    latest = slack_s[finite].max()
    return rate * np.where(finite, np.maximum(slack_s, 0.0), latest)


def level_caps(
    work: np.ndarray, top: np.ndarray, bottom: np.ndarray, limits: np.ndarray, priority: np.ndarray
) -> np.ndarray:
    """*Ours*: raises everybody level by level while all deadlines can be kept; int [n].

    Deadlines are kept while for each of them the work that is due by then fits its limit. Quality is concave
    in work (0.5 -> 0.6 buys most, 0.8 -> 0.9 least), so levels together beat the highest level for a few.
    Where a level fits only in part, the earliest deadlines get it. Higher priorities are raised first, with
    all lower ones at their lowest.
    """
    order = np.argsort(limits, kind="stable")
    work, limits, priority = work[order], limits[order], priority[order]
    top, bottom = top[order].astype(int), bottom[order].astype(int)
    rows, caps = np.arange(len(work)), np.empty(len(work), dtype=int)
    if (np.cumsum(work[rows, top]) <= limits).all():  # the usual case: no load to speak of
        caps[order] = top
        return caps
    chosen = bottom.copy()
    for each in np.unique(priority)[::-1]:
        members = priority == each
        for level in range(work.shape[1] - 2, -1, -1):
            left = limits - np.cumsum(work[rows, chosen])
            # What a row spends counts against its own deadline and all later ones.
            left = np.minimum.accumulate(left[::-1])[::-1]
            raised = np.maximum(np.minimum(chosen, level), top)
            raised = np.where(members & (left >= 0), raised, chosen)
            extra = work[rows, raised] - work[rows, chosen]
            paid = (extra == 0) | (np.cumsum(extra) <= left + 1e-9)
            num_paid = len(paid) if paid.all() else int(paid.argmin())
            chosen[:num_paid] = raised[:num_paid]
            if num_paid < len(paid):
                break
    caps[order] = chosen
    return caps
