-- Processes and their heartbeats. Each lease depends on a row of workers.

-- now --
-- The time of the database's clock, which decides about leases and deadlines.
select now_ms();

-- worker_put --
-- Register a process. Its leases depend on this row.
insert into workers (id, host, version, state, started_at, beat_at, alive_until, runs_items, share_owner, servers, report)
values (:id, :host, :version, 'alive', now_ms(), now_ms(), now_ms() + :lease_ms, :runs_items, :share_owner, :servers, '')
on conflict (id) do nothing;

-- worker_beat --
-- The only write of a heartbeat. No row: this incarnation was declared gone and must not come back.
update workers set beat_at = now_ms(), alive_until = now_ms() + :lease_ms
where id = :id and state = 'alive'
returning alive_until;

-- worker_leases --
-- The slices that this worker has by the store, and the states of their jobs. The worker gives back
-- slices of unknown tokens, stops sending of a job that closes, is paused or must wait, and learns
-- of a moved deadline.
select s.job_id, s.first, s.lease_token, j.state, j.closing, coalesce(now_ms() - j.closing_at, 0) as closing_for_ms,
    case when j.paused_at is not null or j.not_before > now_ms() then 1 else 0 end as must_wait, j.expires_at - now_ms() as expires_in_ms
from slices s
join jobs j on j.id = s.job_id
where s.worker_id = :id and s.state = 'leased';

-- worker_runs_alone --
-- Note the item that will be the only one in flight from this worker; none if several may be.
-- Written before the item is sent.
update workers set alone_job_id = :job_id, alone_number = :number, alone_checked = :is_checked
where id = :id and state = 'alive'
returning id;

-- worker_ran_alone --
-- The item that a lost worker ran alone, if it noted one.
select alone_job_id, alone_number, alone_checked from workers where id = :id and alone_job_id is not null;

-- workers_alive --
-- How many processes are alive that run items.
select count(*) from workers w where w.state = 'alive' and w.alive_until > now_ms() and w.runs_items = 1;

-- worker_report --
-- The report of a process on what keeps it from working. It remains after the process has ended.
update workers set report = :report where id = :id;

-- worker_reports --
-- Processes that run items or did so lately, newest first, with their reports.
select host, case when state = 'alive' and alive_until > now_ms() then 1 else 0 end as is_alive, now_ms() - beat_at as silent_ms, report
from workers
where runs_items = 1 and (state = 'alive' or beat_at > now_ms() - :lately_ms)
order by started_at desc limit :count_max;

-- workers_overdue --
select id, host from workers where state = 'alive' and alive_until < now_ms() order by alive_until limit :count_max;

-- worker_gone --
-- moves: workers: alive -> gone
update workers set state = 'gone' where id = :id and state = 'alive' and (alive_until < now_ms() or :leaving = 1) returning id;

-- workers_list --
-- Living processes first: a process that restarts often leaves very many rows that are gone.
select id, host, version, state, started_at, beat_at, alive_until, runs_items, report, now_ms() as now from workers
order by case when state = 'alive' then 0 else 1 end, started_at desc
limit :count_max;

-- workers_prune --
-- Forget incarnations that ended long ago and own nothing any more.
delete from workers
where state = 'gone' and beat_at < now_ms() - :keep_ms
    and not exists (select 1 from blobs b where b.worker_id = workers.id and b.state = 'writing');
