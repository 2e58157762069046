"""Which seeds the tests run: the fixed ones of every test run, and those that once showed a bug and are kept for ever."""

FIXED_COUNT = 160
CHUNK = 20

# A seed means what plan.py makes of it, so each stands with the planted bug that it shows: those that the engine really had once, and
# those that it never may have. When one no longer shows its bug, the first seed that does takes its place.
ONCE_BROKEN = {
    "charged_twice": 0,
    "close_at_once": 6,
    "deadline_ignored": 6,
    "done_miscounted": 0,
    "finish_any_lease": 11,
    "forget_before_commit": 44,
    "garbage_ignores_uses": 0,
    "given_back_though_sent": 0,
    "heartbeat_ignored": 61,
    "last_budget_forgotten": 0,
    "last_result_wins": 11,
    "lease_unrecorded": 0,
    "leave_for_ever": 175,
    "losses_uncounted": 1,
    "lost_while_read": 25,
    "most_served_first": 31,
    "never_woken": 0,
    "no_urgency": 23,
    "publish_without_step": 1705,
    "record_after_close": 315,
    "release_any_lease": 11,
    "resource_unlimited": 5,
    "rest_ignored": 0,
    "settled_twice": 175,
    "shorter_wait_wins": 326,
    "slots_for_all": 0,
    "start_twice": 2,
    "steps_left_behind": 1,
    "strangers_at_once": 44,
    "throttling_counts": 1,
    "window_ends_early": 5,
    "woken_with_credit": 0,
}
