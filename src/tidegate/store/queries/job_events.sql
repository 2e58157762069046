-- Events of the items of jobs whose door wants them: items began to run, and lines were added to
-- the result files.

-- job_events_begin --
-- The creation of a job is its event 1.
insert into job_event_counts (job_id, count) values (:job_id, 1);

-- job_events_count --
-- Take the numbers of :count more events. The row is locked until the commit, so that numbers
-- appear in order.
update job_event_counts set count = count + :count where job_id = :job_id returning count;

-- job_event_put --
insert into job_events (job_id, number, count, kind, first, output_at, output_bytes, error_at, error_bytes, happened_at)
values (:job_id, :number, :count, :kind, :first, :output_at, :output_bytes, :error_at, :error_bytes, now_ms());

-- job_events_page --
-- Rows with events after this one, in order.
select number, count, kind, first, output_at, output_bytes, error_at, error_bytes, happened_at from job_events
where job_id = :job_id and number + count > cast(:after as bigint) + 1
order by number
limit :count_max;

-- job_events_total --
select count from job_event_counts where job_id = :job_id;

-- job_events_recorded --
-- The times at which lines were added to the result files, with the sizes of the files.
select output_at + output_bytes as output_to, error_at + error_bytes as error_to, happened_at from job_events
where job_id = :job_id and kind = 'recorded'
order by number;

-- job_running_items --
-- How many items run: leased, without an outcome, and not waiting for another try.
select cast(coalesce(sum(s.count
    - (select count(*) from outcomes o where o.job_id = s.job_id and o.number >= s.first and o.number < s.first + s.count)
    - (select count(*) from attempts a
        where a.job_id = s.job_id and a.number >= s.first and a.number < s.first + s.count and a.not_before > now_ms()
            and not exists (select 1 from outcomes p where p.job_id = a.job_id and p.number = a.number))
), 0) as bigint) as items
from slices s
where s.job_id = :job_id and s.state = 'leased';

-- job_leased_spans --
select first, count from slices where job_id = :job_id and state = 'leased' order by first;

-- job_attempts --
-- How often items were tried, and how long each still waits.
select number, count, not_before - now_ms() as wait_ms from attempts
where job_id = :job_id and number >= :first and number < :first + :count order by number;

-- slices_of_span --
-- The slices of a span of items, with their places in the work file.
select first, count, read_first, work_at, work_bytes from slices
where job_id = :job_id and first < cast(:first as bigint) + cast(:count as bigint) and first + count > cast(:first as bigint)
order by first;

-- outcomes_of_span --
select number, outcome, at, size_bytes from outcomes
where job_id = :job_id and number >= :first and number < :first + :count
order by number;

-- outcomes_within --
-- This reads all outcomes of the job. It is used only for damaged bytes.
select number, outcome, at, size_bytes from outcomes
where job_id = :job_id and at >= :start and at < :end_at
  and case outcome when 'answered' then 1 else 0 end = cast(:is_output as bigint)
order by at;

-- job_events_forget --
delete from job_events where job_id = :job_id;

-- job_event_counts_forget --
delete from job_event_counts where job_id = :job_id;
