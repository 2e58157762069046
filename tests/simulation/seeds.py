"""Which seeds the tests run: the fixed ones, which have every kind of fault and every end state, and how many of a family
are tried before a planted bug counts as missed."""

FIXED = range(87, 107)

# Each planted bug shows in a third of its family's seeds or more.
FAMILY_COUNT = 24

# Where each planted bug shows for the least work, unless at seed 0: tried first. One that shows there no more costs only time.
SHOWS_AT = {
    "delivery_unproven": 1, "ends_unreported": 1, "events_of_others": 1, "lost_while_read": 1, "groups_outlive_members": 1,
    "deleted_events_dropped": 1, "publish_without_step": 1, "start_twice": 1, "accepted_twice": 1, "finish_any_lease": 1,
    "permit_for_ever": 1, "window_ends_early": 1, "woken_with_credit": 1, "alone_in_company": 2, "cost_unbounded": 2, "deadline_ignored": 2,
    "error_share_unasked": 2, "shorter_wait_wins": 2, "losses_uncounted": 2, "settled_twice": 2, "money_unreserved": 2,
    "lease_unrecorded": 3, "own_retries_ignored": 3, "one_error_more": 3, "close_at_once": 3, "answered_again": 3, "window_kept": 3,
    "grants_rounded_up": 4, "last_result_wins": 4, "release_any_lease": 4, "pause_ignored_by_leases": 4, "lines_unsynced": 5,
    "done_slice_handed_back": 5, "throttling_counts": 5, "revocation_ignored": 5, "never_escalated": 5, "clock_steps_taken": 6,
    "faults_untold": 7, "forget_before_commit": 10, "messages_untranslated": 10, "next_answer_taken": 10, "reclaim_before_adopt": 11,
    "record_after_close": 11, "heartbeat_ignored": 11, "defaults_replace": 11, "slices_sent_as_chat": 11, "waits_forgotten": 22,
}  # fmt: skip
