-- The store's time and its source. now_ms() is the store's time, wall_ms() the machine's clock.

-- clock_begin --
-- Write the one row, before the first look.
insert into clock (id, ticked_at, behind_ms, from_ms, since_ms, stepped_at, boot_id, boot_ms)
values (1, 0, 0, 0, 0, 0, '', 0)
on conflict (id) do nothing;

-- clock_look --
select now_ms() as now, wall_ms() as wall, ticked_at, behind_ms, from_ms, since_ms, stepped_at, boot_id, boot_ms from clock where id = 1;

-- clock_tick --
-- The tick only moves forward: of two looks at once the later one counts.
update clock set ticked_at = :ticked_at, boot_id = :boot_id, boot_ms = :boot_ms where id = 1 and ticked_at < :ticked_at;

-- clock_set --
update clock set ticked_at = :ticked_at, behind_ms = :behind_ms, from_ms = :from_ms, since_ms = :since_ms, stepped_at = :ticked_at,
    boot_id = :boot_id, boot_ms = :boot_ms
where id = 1;

-- clock_move_workers --
-- The store's time jumps: leases keep their remaining time.
update workers set beat_at = beat_at + :jump_ms, alive_until = alive_until + :jump_ms where state = 'alive';

-- clock_move_slices --
-- A resting slice keeps its remaining rest. Slices behind a canary rest until they are released.
update slices set ready_at = ready_at + :jump_ms where state = 'ready' and ready_at > now_ms() and ready_at < :forever;

-- clock_move_attempts --
-- An item that waits for its Retry-After keeps its remaining wait.
update attempts set not_before = not_before + :jump_ms where not_before > now_ms();

-- clock_lock_budgets --
-- Lock all ledgers, so that their windows can be moved along with the time.
select id, ledger from budgets order by id /*! for update */;

-- clock_move_budget --
update budgets set ledger = :ledger, used_at = used_at + :jump_ms, empty_at = :empty_at where id = :id;
