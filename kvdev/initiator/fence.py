"""When nothing that was sent to a lost association can take effect any more. Arithmetic only.

Spec: NVM Express Base 3.9.5 and 9.6.2 (KATT is the keep alive timeout in effect).
"""

from __future__ import annotations

from kvdev.clock import NS_PER_MS, NS_PER_S


def fence_ns(
    *,
    closed_ns: int,
    keep_alive_sent_ns: int,
    kato_ms: int,
    is_traffic_based: bool,
    cqt_ms: int,
    cqt_default_s: float,
    is_detected: bool = False,
    wait_s: float | None = None,
) -> int:
    """The time from which the writes of an association may be sent again.

    Args:
        closed_ns: when the last of its connections was closed on our side.
        keep_alive_sent_ns: when its controller's timer may have been started anew for the last time.
        is_traffic_based: any command starts the timer, and expiry is seen an interval later.
        cqt_ms: how long the controller needs to stop once it has noticed; 0 where it does not say.
        is_detected: it has noticed already.
        wait_s: the operator's wait, in place of the rule.
    """
    if wait_s is not None:
        return closed_ns + int(wait_s * NS_PER_S)
    stop_ns = cqt_ms * NS_PER_MS if cqt_ms else int(cqt_default_s * NS_PER_S)
    if is_detected:
        return closed_ns + stop_ns
    if is_traffic_based:
        return closed_ns + 3 * kato_ms * NS_PER_MS + stop_ns
    # The rule counts from the last Keep Alive, which may be long before the loss was noticed; what was sent
    # after it is still in time to be executed, but not after the controller's own timer has run out.
    return max(closed_ns, keep_alive_sent_ns + 2 * kato_ms * NS_PER_MS) + stop_ns
