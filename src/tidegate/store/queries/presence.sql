-- What processes tell each other about their calls, so that none takes another's for a stranger's.

-- presence_put --
insert into presence (deployment, worker_id, workers, calls, interactive, interactive_awaiting, has_gateway, why, told_at)
values (:deployment, :worker_id, :workers, :calls, :interactive, :interactive_awaiting, :has_gateway, :why, now_ms())
on conflict (deployment, worker_id) do update set
    workers = excluded.workers, calls = excluded.calls, interactive = excluded.interactive,
    interactive_awaiting = excluded.interactive_awaiting, has_gateway = excluded.has_gateway, why = excluded.why,
    told_at = excluded.told_at;

-- presence_others --
-- What everybody else told lately, each by itself, and how long ago.
select p.deployment, p.worker_id, p.workers, p.calls, p.interactive, p.interactive_awaiting, p.has_gateway, now_ms() - p.told_at as age_ms
from presence p
where p.worker_id <> :worker_id and p.told_at > now_ms() - :lately_ms
order by p.told_at desc
limit :count_max;

-- presence_list --
-- Why tides stand as they do; a process without batch calls says nothing of it.
select p.deployment, p.why from presence p
where p.told_at > now_ms() - :lately_ms and p.why <> ''
order by p.deployment, p.worker_id
limit :count_max;

-- presence_forget --
delete from presence where told_at < now_ms() - :keep_ms;
