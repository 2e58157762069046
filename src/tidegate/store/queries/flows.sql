-- Flows: the queue of one share owner for one model, its service, and whether it has work; and the
-- clocks and rates of models.

-- flow_put --
-- A flow begins asleep, so that there is only one way to wake.
insert into flows (model, share_owner, tenant_id, state, weight_milli, served, served_tokens, changed_at)
values (:model, :share_owner, :tenant_id, 'asleep', 1000, 0, 0, now_ms())
on conflict (model, share_owner) do nothing;

-- flow_lift --
-- The place where a flow begins that wakes now: at the least served awake flow of its model, or at
-- the last one that went to sleep.
select coalesce(
    (select min(f.served) from flows f where f.model = :model and f.state = 'awake'),
    (select c.clock from model_clocks c where c.model = :model), 0) as lift;

-- flow_wake --
-- Wake a flow for new work. An awake flow is written too: a sweep that is about to put it to sleep
-- waits for that, and then finds the new work. Only a flow that slept is lifted, and none is
-- lowered.
-- moves: flows: asleep -> awake
update flows set state = 'awake', wakes_at = null,
    weight_milli = coalesce(cast(:weight_milli as bigint), weight_milli),
    changed_at = case when state = 'asleep' then now_ms() else changed_at end,
    served = case when state = 'asleep' and served < :lift then :lift else served end
where model = :model and share_owner = :share_owner and state in ('awake', 'asleep');

-- flow_hold --
-- Lock a flow while it is decided whether it may sleep: a transaction that wakes it waits for that.
-- A flow that is being charged is left for the next sweep.
select served from flows where model = :model and share_owner = :share_owner and state = 'awake' /*! for update skip locked */;

-- flow_work --
-- Whether a flow has any work, and whether any of it is leased or could be leased now.
select
    case when exists (select 1 from job_models m where m.model = :model and m.share_owner = :share_owner and m.state = 'open')
        then 1 else 0 end as has_open,
    case when exists (
        select 1 from job_models m
        where m.model = :model and m.share_owner = :share_owner and m.state = 'open' and (
            exists (select 1 from slices s where s.job_id = m.job_id and s.model = m.model and s.state = 'leased')
            or m.rests_until <= now_ms() and exists (select 1 from slices s
                where s.job_id = m.job_id and s.model = m.model and s.state = 'ready' and s.ready_at <= now_ms())
        )
    ) then 1 else 0 end as is_active;

-- flow_ready_at --
-- The time at which the first resting slice of a flow may run.
select min(case when s.ready_at > m.rests_until then s.ready_at else m.rests_until end) from job_models m
join slices s on s.job_id = m.job_id and s.model = m.model and s.state = 'ready'
where m.model = :model and m.share_owner = :share_owner and m.state = 'open';

-- flow_sleep --
-- The flow has no work, or none before `wakes_at`. It gets no credit for its sleep.
-- moves: flows: awake -> asleep
update flows set state = 'asleep', changed_at = now_ms(), wakes_at = :wakes_at
where model = :model and share_owner = :share_owner and state = 'awake';

-- clock_advance --
insert into model_clocks (model, clock) values (:model, :clock)
on conflict (model) do update set clock = case when model_clocks.clock > excluded.clock then model_clocks.clock else excluded.clock end;

-- flows_rested --
select model, share_owner from flows where state = 'asleep' and wakes_at <= now_ms() order by wakes_at limit :count_max;

-- flows_page --
-- A sweep's look at awake flows, in order: whether a flow has spent models of jobs, and whether it
-- is active.
select f.model, f.served, f.share_owner, f.weight_milli, coalesce(t.name, '') as tenant,
    case when exists (
        select 1 from job_models m
        where m.model = f.model and m.share_owner = f.share_owner and m.state = 'open'
            and not exists (select 1 from slices s where s.job_id = m.job_id and s.model = m.model and s.state = 'ready')
            and not exists (select 1 from slices s where s.job_id = m.job_id and s.model = m.model and s.state = 'leased')
    ) then 1 else 0 end as has_spent,
    case when exists (
        select 1 from job_models m
        where m.model = f.model and m.share_owner = f.share_owner and m.state = 'open' and (
            exists (select 1 from slices s where s.job_id = m.job_id and s.model = m.model and s.state = 'leased')
            or m.rests_until <= now_ms() and exists (select 1 from slices s
                where s.job_id = m.job_id and s.model = m.model and s.state = 'ready' and s.ready_at <= now_ms())
        )
    ) then 1 else 0 end as is_active
from flows f
left join tenants t on t.id = f.tenant_id
where f.state = 'awake' and (f.model, f.served, f.share_owner) > (:model, :served, :share_owner)
order by f.model, f.served, f.share_owner
limit :count_max;

-- flow_weigh --
-- From now on service counts by this weight. Earlier charges are not changed.
update flows set weight_milli = :weight_milli where model = :model and share_owner = :share_owner and weight_milli <> :weight_milli;

-- flow_charge --
-- Charge the real cost divided by the weight, rounded up, so that nothing is free.
update flows set
    served = served + (cast(:cost as bigint) * 1000 + weight_milli - 1) / weight_milli,
    served_tokens = served_tokens + :cost
where model = :model and share_owner = :share_owner;

-- flows_forget --
-- Forget flows that slept so long that they would begin like new ones.
delete from flows
where state = 'asleep' and wakes_at is null and changed_at < now_ms() - :keep_ms
    and not exists (select 1 from job_models m where m.model = flows.model and m.share_owner = flows.share_owner and m.state = 'open');

-- rate_add --
-- The first of these calls began `since_ms` ago. Only time that was not counted before is added to
-- the worker's busy time.
insert into rates (model, minute, worker_id, units, tokens, items, busy_ms, call_ms, last_at, input_tokens, servers,
    unit_squares, unit_ms, unit_tokens)
values (:model, now_ms() / 60000, :worker_id, :units, :tokens, :items,
    case when cast(:since_ms as bigint) < now_ms() % 60000 then cast(:since_ms as bigint) else now_ms() % 60000 end, :call_ms, now_ms(),
    :input_tokens, coalesce((select w.servers from workers w where w.id = :worker_id), ''),
    cast(:unit_squares as double precision), cast(:unit_ms as double precision), cast(:unit_tokens as double precision))
on conflict (model, minute, worker_id) do update set
    units = rates.units + excluded.units, tokens = rates.tokens + excluded.tokens, items = rates.items + excluded.items,
    busy_ms = rates.busy_ms + case when excluded.busy_ms < excluded.last_at - rates.last_at then excluded.busy_ms
        when excluded.last_at > rates.last_at then excluded.last_at - rates.last_at else 0 end,
    call_ms = rates.call_ms + excluded.call_ms, last_at = excluded.last_at, input_tokens = rates.input_tokens + excluded.input_tokens,
    unit_squares = rates.unit_squares + excluded.unit_squares, unit_ms = rates.unit_ms + excluded.unit_ms,
    unit_tokens = rates.unit_tokens + excluded.unit_tokens;

-- rates_forget --
delete from rates where minute < now_ms() / 60000 - :keep_minutes;

-- rates_recent --
-- What all workers together served of a model lately, one row for each minute. A run with its own
-- model servers asks only for theirs.
select r.minute, cast(sum(r.units) as bigint) as units, cast(sum(r.tokens) as bigint) as tokens, cast(sum(r.items) as bigint) as items,
    max(r.busy_ms) as busy_ms, cast(sum(r.call_ms) as bigint) as call_ms, cast(sum(r.input_tokens) as bigint) as input_tokens,
    sum(r.unit_squares) as unit_squares, sum(r.unit_ms) as unit_ms, sum(r.unit_tokens) as unit_tokens
from rates r
where r.model = :model and r.minute > now_ms() / 60000 - :minutes and (:servers = '' or r.servers in ('', :servers))
group by r.minute
order by r.minute;

-- flows_weight --
-- How many flows share a model now, and the sum of their weights.
select count(*) as flows, cast(coalesce(sum(weight_milli), 0) as bigint) as weight_milli from flows where model = :model and state = 'awake';

-- flows_changed --
-- The last time at which another flow of a model woke or went to sleep.
select coalesce(max(f.changed_at), 0) as changed_at from flows f where f.model = :model and f.share_owner <> :share_owner;

-- flows_backlog --
-- The other flows that share a model now, and the work that is left of their jobs, within a bound.
select f.weight_milli, cast(coalesce((select sum(o.units) from (
    select m.work_units - m.work_units * m.done_count / m.item_count as units from job_models m
    where m.model = f.model and m.share_owner = f.share_owner and m.state = 'open'
    order by m.priority desc, m.created_at, m.job_id
    limit :jobs_max
) o), 0) as bigint) as units,
    cast(coalesce((select sum(o.items) from (
        select m.item_count - m.done_count as items from job_models m
        where m.model = f.model and m.share_owner = f.share_owner and m.state = 'open'
        order by m.priority desc, m.created_at, m.job_id
        limit :jobs_max
    ) o), 0) as bigint) as items
from flows f
where f.model = :model and f.state = 'awake' and f.share_owner <> :share_owner
order by f.served, f.share_owner
limit :flows_max;
