-- The scheduler's look. It is bounded and reads only indexes, so it costs the same with a thousand
-- and with ten million queued items.

-- part owner_of_worker --
-- The share owner that this worker works for; empty for a worker of all.
coalesce((select w.share_owner from workers w where w.id = :worker_id), '');

-- snapshot_now --
-- The time of the look, how many workers choose among the same jobs, and three facts about ready
-- slices: `level` is how many owners the worst suspects lost, and `suspect_count` how many slices
-- lost that many. `recent_count` is how many slices lost an owner within the last ten seconds, but
-- not more than :search_max owners, after which the search for a culprit makes no slice wait.
-- Suspects of a job that is paused, closes, or is not for this worker do not count, because it
-- cannot run them.
select now_ms() as now,
    (select count(*) from workers c where c.state = 'alive' and c.alive_until > now_ms() and c.runs_items = 1
        and c.share_owner in ('', {owner_of_worker})) as workers,
    coalesce((select max(q.lost_count) from slices q where q.state = 'ready' and q.lost_count > 0 and q.lost_count >= 3
        and exists (select 1 from job_models m where m.job_id = q.job_id and m.model = q.model and m.state = 'open'
            and {owner_of_worker} in ('', m.share_owner))), 0) as level,
    (select count(*) from slices s where s.state = 'ready' and s.lost_count > 0 and s.lost_count >= 3
        and exists (select 1 from job_models m where m.job_id = s.job_id and m.model = s.model and m.state = 'open'
            and {owner_of_worker} in ('', m.share_owner))
        and s.lost_count = (select max(q.lost_count) from slices q where q.state = 'ready' and q.lost_count > 0
            and exists (select 1 from job_models m where m.job_id = q.job_id and m.model = q.model and m.state = 'open'
                and {owner_of_worker} in ('', m.share_owner)))) as suspect_count,
    (select count(*) from slices f where f.state = 'ready' and f.lost_count > 0 and f.lost_count <= :search_max
        and f.ready_at > now_ms() - 10000) as recent_count;

-- awake_models --
-- The models that have work, each found by one step in an index.
with recursive awake (model) as (
    select min(f.model) from flows f where f.state = 'awake'
    union all
    select (select min(f.model) from flows f where f.state = 'awake' and f.model > a.model) from awake a where a.model is not null
)
select a.model from awake a where a.model is not null limit :count_max;

-- unleased_models --
-- Models with due work of which nothing is leased.
with recursive awake (model) as (
    select min(f.model) from flows f where f.state = 'awake'
    union all
    select (select min(f.model) from flows f where f.state = 'awake' and f.model > a.model) from awake a where a.model is not null
)
select a.model from awake a
where not exists (select 1 from slices l where l.state = 'leased' and l.model = a.model)
    and (select 1 from job_models o
        where o.model = a.model and o.state = 'open' and o.expires_at > :now and o.rests_until <= :now
            and (select 1 from slices s where s.job_id = o.job_id and s.model = o.model and s.state = 'ready'
                and s.ready_at <= :now order by s.first limit 1) is not null
        order by o.due_at, o.job_id limit 1) is not null
limit :count_max;

-- snapshot_in_flight --
-- All leased slices, one row each, because sums would need a sort. Return also how many owners each
-- lost, and whether this worker has it.
select s.job_id, s.model, coalesce(s.leased_as, 'fifo') as why,
    coalesce((select m.share_owner from job_models m where m.job_id = s.job_id and m.model = s.model), '') as share_owner, s.work_units,
    s.lost_count, case when s.worker_id = :worker_id then 1 else 0 end as is_mine
from slices s
where s.state = 'leased';

-- part has_startable_slice --
-- Whether a job `o` of a model has a slice that this worker may lease: due, and with fewer than
-- :lost_below lost owners. While a culprit is searched for (:is_searching), a job with a leased
-- slice that lost owners keeps its last :kept slices that lost fewer for checks. `(select 1 ...
-- order by ... limit 1) is not null` means `exists`, but no planner turns it into a join of whole
-- tables.
(select 1 from slices s where s.job_id = o.job_id and s.model = o.model and s.state = 'ready'
    and s.ready_at <= :now and s.lost_count < :lost_below and (cast(:is_searching as bigint) = 0
        or not exists (select 1 from slices z where z.job_id = o.job_id and z.model = o.model and z.state = 'leased'
            and z.lost_count > s.lost_count and z.lost_count <= :search_max and (s.lost_count = 0 or z.lost_count > 3))
        or (select 1 from slices r where r.job_id = o.job_id and r.model = o.model and r.state = 'ready'
            and r.lost_count <= s.lost_count order by r.first limit 1 offset :kept) is not null) order by s.first limit 1) is not null;

-- part job_columns --
-- The columns that the scheduler needs of a job `o` of a model.
o.model, o.share_owner, o.job_id, o.created_at, o.expires_at, case when o.begun_at is null then o.begin_by end as begin_by,
    o.work_units, o.item_count, o.done_count, o.slice_count, o.leased_at, o.begun_at, o.queue, o.priority;

-- snapshot_flows --
-- The least served flows of a model that have a slice ready for this worker. `is_long`: the flow
-- has more than :jobs_max jobs.
select f.model, f.share_owner, f.weight_milli, f.served,
    (select 1 from job_models more where more.model = f.model and more.share_owner = f.share_owner and more.state = 'open'
        order by more.priority desc, more.created_at, more.job_id limit 1 offset :jobs_max) is not null as is_long
from flows f
where f.model = :model and f.state = 'awake' and {owner_of_worker} in ('', f.share_owner)
    and (select 1 from job_models o
        where o.model = f.model and o.share_owner = f.share_owner and o.state = 'open' and o.expires_at > :now and o.rests_until <= :now
            and {has_startable_slice}
        order by o.priority desc, o.created_at, o.job_id limit 1) is not null
order by f.served, f.share_owner
limit :flows_max;

-- snapshot_oldest --
-- The oldest jobs of a flow that can start, of its highest priorities.
select {job_columns}
from job_models o
where o.model = :model and o.share_owner = :share_owner and o.state = 'open' and o.expires_at > :now and o.rests_until <= :now
    and {has_startable_slice}
order by o.priority desc, o.created_at, o.job_id
limit :jobs_max;

-- snapshot_smallest --
-- The smallest jobs of a flow that can start, of its highest priorities.
select {job_columns}
from job_models o
where o.model = :model and o.share_owner = :share_owner and o.state = 'open' and o.expires_at > :now and o.rests_until <= :now
    and {has_startable_slice}
order by o.priority desc, o.work_units, o.job_id
limit :jobs_max;

-- snapshot_due --
-- The jobs of a model that can start and are due first, whatever their flow, with the weight and
-- service of the flow. Each open job has a flow. Both are looked up by their key, because
-- PostgreSQL reads all flows for a join.
select due.*,
    (select f.weight_milli from flows f where f.model = due.model and f.share_owner = due.share_owner) as weight_milli,
    (select f.served from flows f where f.model = due.model and f.share_owner = due.share_owner) as served
from (
    select {job_columns}
    from job_models o
    where o.model = :model and o.state = 'open' and o.expires_at > :now and o.rests_until <= :now
        and {owner_of_worker} in ('', o.share_owner) and {has_startable_slice}
    order by o.due_at, o.job_id
    limit :due_max
) due;

-- outlook_job --
-- For each model of a job: its own work, the work of its flow that goes first, the work in flight,
-- and the flow's weight.
select m.model, m.work_units, m.item_count, m.done_count, m.share_owner, m.state, coalesce(f.weight_milli, 1000) as weight_milli,
    cast(coalesce((select sum(ahead.units) from (
        select o.work_units - o.work_units * o.done_count / o.item_count as units from job_models o
        where o.model = m.model and o.share_owner = m.share_owner and o.state = 'open'
            and (o.priority > m.priority or (o.priority = m.priority
                and (o.created_at < m.created_at or (o.created_at = m.created_at and o.job_id < m.job_id))))
        order by o.priority desc, o.created_at, o.job_id
        limit :jobs_max
    ) ahead), 0) as bigint) as ahead_units,
    cast(coalesce((select sum(ahead.items) from (
        select o.item_count - o.done_count as items from job_models o
        where o.model = m.model and o.share_owner = m.share_owner and o.state = 'open'
            and (o.priority > m.priority or (o.priority = m.priority
                and (o.created_at < m.created_at or (o.created_at = m.created_at and o.job_id < m.job_id))))
        order by o.priority desc, o.created_at, o.job_id
        limit :jobs_max
    ) ahead), 0) as bigint) as ahead_items,
    cast(coalesce((select sum(s.work_units) from slices s
        where s.job_id = m.job_id and s.model = m.model and s.state = 'leased'), 0) as bigint) as in_flight_units
from job_models m
left join flows f on f.model = m.model and f.share_owner = m.share_owner
where m.job_id = :job_id
order by m.model;
