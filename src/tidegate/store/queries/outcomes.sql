-- Record: the outcomes of items, and the attempts of items that wait.

-- attempts_waiting --
-- Why items wait for another try, or waited when their job expired or was cancelled.
select a.reason, count(*) as items from attempts a
where a.job_id = :job_id
    and not exists (
        select 1 from outcomes o
        where o.job_id = a.job_id and o.number = a.number and o.outcome not in ('expired', 'cancelled')
    )
group by a.reason
order by a.reason;

-- job_lock --
-- Record begins with this lock, which serializes all flushes of a job. No row: the job closed, and
-- the answers are paid but unused. The lock is the one that `job_add` will need. The row is not
-- written, because each version of a row slows other readers down.
select output_file_id, error_file_id, output_bytes, error_bytes, share_owner, door is not null as has_item_events from jobs
where id = :id and state in ('in_progress', 'cancelling') /*! for no key update */;

-- outcome_put --
-- The first result counts. A second one returns no row.
insert into outcomes (job_id, number, outcome, at, size_bytes, crc32)
values (:job_id, :number, :outcome, :at, :size_bytes, :crc32)
on conflict (job_id, number) do nothing
returning number;

-- outcome_move --
update outcomes set at = :at where job_id = :job_id and number = :number;

-- job_add --
-- Add the counters, usage and sizes of new outcomes. A job whose last item is done becomes
-- `finalizing`. Return also whether it is over its maximum cost or errors, and whether its canary
-- is done.
-- moves: jobs: in_progress -> finalizing
update jobs set
    answered_count = answered_count + :answered, failed_count = failed_count + :failed,
    input_tokens = input_tokens + :input_tokens, cached_tokens = cached_tokens + :cached_tokens,
    output_tokens = output_tokens + :output_tokens, reasoning_tokens = reasoning_tokens + :reasoning_tokens,
    output_bytes = output_bytes + :output_bytes, error_bytes = error_bytes + :error_bytes,
    unused_count = unused_count + :unused, cost_nano = cost_nano + :cost_nano,
    schema_invalid_count = schema_invalid_count + :schema_invalid, unsent_count = unsent_count + :unsent,
    closing = case when state = 'in_progress' and closing is null
        and answered_count + failed_count + :answered + :failed = item_count - deduplicated_count - reused_count then 'completed' else closing end,
    closing_at = case when state = 'in_progress' and closing is null
        and answered_count + failed_count + :answered + :failed = item_count - deduplicated_count - reused_count then now_ms() else closing_at end,
    finalizing_at = case when state = 'in_progress' and closing is null
        and answered_count + failed_count + :answered + :failed = item_count - deduplicated_count - reused_count then now_ms() else finalizing_at end,
    state = case when state = 'in_progress' and closing is null
        and answered_count + failed_count + :answered + :failed = item_count - deduplicated_count - reused_count then 'finalizing' else state end
where id = :id and state in ('in_progress', 'cancelling')
returning id, state, cost_nano > max_cost_nano or failed_count > max_errors_count
    or (1000000 * failed_count > max_errors_ppm * (answered_count + failed_count)
        and answered_count + failed_count >= case when max_errors_after < item_count - deduplicated_count - reused_count
            then max_errors_after else item_count - deduplicated_count - reused_count end)
    or (max_errors_ppm = 1000000 and answered_count = 0 and failed_count - unsent_count >= max_errors_after) as is_over,
    canary_state = 'running' and answered_count + failed_count >= canary_items as is_sampled;

-- job_add_unused --
-- Count answers that were late or repeated: paid for, but not used.
update jobs set unused_count = unused_count + :unused where id = :id;

-- attempt_put --
-- A shorter wait never replaces a longer one.
insert into attempts (job_id, number, count, not_before, reason, hand_backs, tries)
values (:job_id, :number, :count, now_ms() + :delay_ms, :reason, :hand_backs, :tries)
on conflict (job_id, number) do update set
    tries = case when length(attempts.tries) > length(excluded.tries) then attempts.tries else excluded.tries end,
    hand_backs = case when attempts.hand_backs > excluded.hand_backs then attempts.hand_backs else excluded.hand_backs end,
    count = case when attempts.count > excluded.count then attempts.count else excluded.count end,
    not_before = case when attempts.not_before > excluded.not_before then attempts.not_before else excluded.not_before end,
    reason = excluded.reason;

-- attempt_lost --
-- An item whose owner was lost may have been sent already. This row records why it is sent again.
insert into attempts (job_id, number, count, not_before, reason)
values (:job_id, :number, 0, now_ms(), 'owner_lost')
on conflict (job_id, number) do update set reason = excluded.reason;

-- attempt_lost_alone --
-- The item was the only one in flight when its worker was lost. The first such loss always counts.
-- A later one counts only if another item ran alone in between and survived.
update attempts set alone_losses = alone_losses + 1
where job_id = :job_id and number = :number and (alone_losses = 0 or cast(:is_checked as bigint) = 1);

-- outcomes_page --
-- The outcomes of a job in order of number, for readers of all of them.
select number, outcome, at, size_bytes from outcomes where job_id = :job_id and number >= :from_number order by number limit :count_max;

-- outcome_place --
-- The place in one of the two result files where the line after :lines lines begins.
select at from outcomes
where job_id = :job_id and case outcome when 'answered' then 1 else 0 end = cast(:is_output as bigint)
order by at limit 1 offset :lines;

-- outcomes_forget --
delete from outcomes where job_id = :job_id;

-- attempts_forget --
delete from attempts where job_id = :job_id;

-- jobs_by_part --
-- Jobs by the letters in their items' ids, for lines of an adopted log. Closed jobs are included:
-- their answers count as unused.
select id from jobs where id >= :low and id < :high and state <> 'validating' limit 2;
