"""Which seeds the tests run: the fixed ones of every test run, and those that once showed a bug and are kept for ever."""

FIXED_COUNT = 320
CHUNK = 20

# A seed means what plan.py makes of it, so each stands with the planted bug that it shows: those that the engine really had once, and
# those that it never may have. When one no longer shows its bug, the first seed that does takes its place.
ONCE_BROKEN = {
    "close_at_once": 4,
    "deadline_ignored": 32,
    "finish_after_close": 18,
    "finish_any_lease": 90,
    "forget_before_commit": 9,
    "garbage_ignores_uses": 0,
    "heartbeat_ignored": 90,
    "last_result_wins": 18,
    "lease_unrecorded": 0,
    "losses_uncounted": 31,
    "lost_while_read": 0,
    "publish_without_step": 348,
    "reclaim_before_adopt": 3,
    "record_after_close": 18,
    "release_any_lease": 43,
    "shorter_wait_wins": 291,
    "start_twice": 4,
    "steps_left_behind": 8,
    "strangers_at_once": 3,
    "suspects_together": 54,
    "throttling_counts": 162,
    "waits_forgotten": 178,
}
