-- Reports of processes about their calls, so that none counts the calls of another as unknown.

-- fleet_report_put --
insert into fleet_reports (deployment, worker_id, workers, calls, interactive, interactive_awaiting, has_gateway, why, tide, reported_at)
values (:deployment, :worker_id, :workers, :calls, :interactive, :interactive_awaiting, :has_gateway, :why, :tide, now_ms())
on conflict (deployment, worker_id) do update set
    workers = excluded.workers, calls = excluded.calls, interactive = excluded.interactive,
    interactive_awaiting = excluded.interactive_awaiting, has_gateway = excluded.has_gateway, why = excluded.why, tide = excluded.tide,
    reported_at = excluded.reported_at;

-- fleet_report_others --
-- The recent reports of all other processes, with their ages.
select r.deployment, r.worker_id, r.workers, r.calls, r.interactive, r.interactive_awaiting, r.has_gateway, now_ms() - r.reported_at as age_ms
from fleet_reports r
where r.worker_id <> :worker_id and r.reported_at > now_ms() - :lately_ms
order by r.reported_at desc
limit :count_max;

-- fleet_report_learned --
-- How many batch calls each deployment took at the last report of a process, which begins there
-- after a restart.
select r.deployment, r.tide from fleet_reports r
where r.worker_id = :worker_id and r.reported_at > now_ms() - :lately_ms
limit :count_max;

-- fleet_report_list --
-- The reasons for tides. A process without batch calls reports none.
select r.deployment, r.why from fleet_reports r
where r.reported_at > now_ms() - :lately_ms and r.why <> ''
order by r.deployment, r.worker_id
limit :count_max;

-- fleet_report_loads --
-- The reported calls at each deployment, and how many batch calls the tides allow.
select r.deployment, sum(r.tide) as tide, sum(r.calls) as calls, sum(r.interactive) as interactive from fleet_reports r
where r.reported_at > now_ms() - :lately_ms
group by r.deployment;

-- fleet_report_forget --
delete from fleet_reports where reported_at < now_ms() - :keep_ms;
