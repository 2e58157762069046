-- The scheduler's look: bounded, from indexes alone, the same work with a thousand and with ten million items queued.

-- snapshot_now --
-- The moment of the look and how many workers choose. Of ready slices: how many owners the worst suspects lost, how many slices lost so
-- many, and how many lost an owner within the last ten seconds, but not more than :search_max owners: what is not found by then keeps
-- nothing waiting.
select now_ms() as now, (select count(*) from workers w where w.state = 'alive' and w.alive_until > now_ms()) as workers,
    coalesce((select max(q.lost_count) from slices q where q.state = 'ready' and q.lost_count > 0 and q.lost_count >= 2), 0) as level,
    (select count(*) from slices s where s.state = 'ready' and s.lost_count > 0 and s.lost_count >= 2
        and s.lost_count = (select max(q.lost_count) from slices q where q.state = 'ready' and q.lost_count > 0)) as suspect_count,
    (select count(*) from slices f where f.state = 'ready' and f.lost_count > 0 and f.lost_count <= :search_max
        and f.ready_at > now_ms() - 10000) as recent_count;

-- awake_models --
-- The models that have anything to do, each found by one step in an index.
with recursive awake (model) as (
    select min(f.model) from flows f where f.state = 'awake'
    union all
    select (select min(f.model) from flows f where f.state = 'awake' and f.model > a.model) from awake a where a.model is not null
)
select a.model from awake a where a.model is not null limit :count_max;

-- unleased_models --
-- Models with work that is due, of which nothing is out: nobody leases it.
with recursive awake (model) as (
    select min(f.model) from flows f where f.state = 'awake'
    union all
    select (select min(f.model) from flows f where f.state = 'awake' and f.model > a.model) from awake a where a.model is not null
)
select a.model from awake a
where a.model is not null
    and not exists (select 1 from slices l where l.state = 'leased' and l.model = a.model)
    and (select 1 from job_models o
        where o.model = a.model and o.state = 'open' and o.expires_at > :now and o.rests_until <= :now
            and (select 1 from slices s where s.job_id = o.job_id and s.model = o.model and s.state = 'ready'
                and s.ready_at <= :now order by s.first limit 1) is not null
        order by o.due_at, o.job_id limit 1) is not null
limit :count_max;

-- snapshot_in_flight --
-- What is out, slice by slice, as many as workers hold: summing up here would sort them first. Says too how many owners
-- each lost, and whether this worker holds it.
select s.job_id, s.model, coalesce(s.leased_as, 'fifo') as why,
    coalesce((select m.share_owner from job_models m where m.job_id = s.job_id and m.model = s.model), '') as share_owner, s.work_units,
    s.lost_count, case when s.worker_id = :worker_id then 1 else 0 end as is_mine
from slices s
where s.state = 'leased';

-- snapshot_models --
-- All models that have anything to do, and of each that the worker has room for: the flows that were served least and have a slice ready
-- for this worker, each with its oldest and its smallest jobs, and the jobs of any flow that are due first. Lists come as text, which lets
-- an index give the first few of each: :within, :between and :behind are characters that no name contains. The models asked for each stand
-- between :between and :behind.
-- While a culprit is searched for (:is_searching), a job of which another slice is out that lost owners shows the last :kept slices that
-- lost none to nobody: they are kept for checks.
-- `(select 1 ... order by ... limit 1) is not null` is `exists`, as no planner turns it into a join of whole tables; the limit that
-- bounds nothing lets each flow's jobs be read once.
with recursive awake (model) as (
    select min(f.model) from flows f where f.state = 'awake'
    union all
    select (select min(f.model) from flows f where f.state = 'awake' and f.model > a.model) from awake a where a.model is not null
)
select a.model,
    case when a.is_wanted then (select string_agg(flow_list.line, cast(:behind as text)) from (
        select concat_ws(cast(:within as text), flow.share_owner, flow.weight_milli, flow.served,
            concat_ws(cast(:between as text), flow.jobs, flow.smallest)) as line
        from (
            select f.share_owner, f.weight_milli, f.served, (
                select string_agg(oldest.line, cast(:between as text)) from (
                    select concat_ws(cast(:within as text), o.job_id, o.created_at, o.expires_at,
                        case when o.begun_at is null then coalesce(o.begin_by, -1) else -1 end, o.work_units, o.item_count, o.done_count,
                        o.slice_count, coalesce(o.leased_at, -1), coalesce(o.begun_at, -1), o.queue) as line
                    from job_models o
                    where o.model = f.model and o.share_owner = f.share_owner and o.state = 'open' and o.expires_at > :now and o.rests_until <= :now
                        and (select 1 from slices s where s.job_id = o.job_id and s.model = o.model and s.state = 'ready'
                            and s.ready_at <= :now and s.lost_count < :lost_below and (cast(:is_searching as bigint) = 0 or s.lost_count > 0
                                or not exists (select 1 from slices z where z.job_id = o.job_id and z.model = o.model
                                    and z.state = 'leased' and z.lost_count between 1 and :search_max)
                                or (select 1 from slices r where r.job_id = o.job_id and r.model = o.model and r.state = 'ready'
                                    and r.lost_count = 0 order by r.first limit 1 offset :kept) is not null) order by s.first limit 1) is not null
                    order by o.created_at, o.job_id
                    limit :jobs_max
                ) oldest
            ) as jobs, case when (
                select 1 from job_models more where more.model = f.model and more.share_owner = f.share_owner and more.state = 'open'
                order by more.created_at limit 1 offset :jobs_max
            ) is not null then (
                select string_agg(smallest.line, cast(:between as text)) from (
                    select concat_ws(cast(:within as text), o.job_id, o.created_at, o.expires_at,
                        case when o.begun_at is null then coalesce(o.begin_by, -1) else -1 end, o.work_units, o.item_count, o.done_count,
                        o.slice_count, coalesce(o.leased_at, -1), coalesce(o.begun_at, -1), o.queue) as line
                    from job_models o
                    where o.model = f.model and o.share_owner = f.share_owner and o.state = 'open' and o.expires_at > :now and o.rests_until <= :now
                        and (select 1 from slices s where s.job_id = o.job_id and s.model = o.model and s.state = 'ready'
                            and s.ready_at <= :now and s.lost_count < :lost_below and (cast(:is_searching as bigint) = 0 or s.lost_count > 0
                                or not exists (select 1 from slices z where z.job_id = o.job_id and z.model = o.model
                                    and z.state = 'leased' and z.lost_count between 1 and :search_max)
                                or (select 1 from slices r where r.job_id = o.job_id and r.model = o.model and r.state = 'ready'
                                    and r.lost_count = 0 order by r.first limit 1 offset :kept) is not null) order by s.first limit 1) is not null
                    order by o.work_units, o.job_id
                    limit :jobs_max
                ) smallest
            ) end as smallest
            from flows f
            where f.model = a.model and f.state = 'awake'
            order by f.served, f.share_owner
            limit 1000000
        ) flow
        where flow.jobs is not null
        limit :flows_max
    ) flow_list) end as flows,
    case when a.is_wanted then (select string_agg(concat_ws(cast(:within as text), m.job_id, m.created_at, m.expires_at,
        case when m.begun_at is null then coalesce(m.begin_by, -1) else -1 end, m.work_units, m.item_count, m.done_count,
        m.slice_count, coalesce(m.leased_at, -1), coalesce(m.begun_at, -1), m.queue, m.share_owner,
        coalesce((select concat_ws(cast(:within as text), f.weight_milli, f.served) from flows f
            where f.model = a.model and f.share_owner = m.share_owner), '1000' || cast(:within as text) || '0')), cast(:between as text))
    from (
        select o.job_id, o.created_at, o.expires_at, o.begin_by, o.work_units, o.item_count, o.done_count, o.slice_count,
            o.leased_at, o.begun_at, o.queue, o.share_owner
        from job_models o
        where o.model = a.model and o.state = 'open' and o.expires_at > :now and o.rests_until <= :now
            and (select 1 from slices s where s.job_id = o.job_id and s.model = o.model and s.state = 'ready'
                and s.ready_at <= :now and s.lost_count < :lost_below and (cast(:is_searching as bigint) = 0 or s.lost_count > 0
                                or not exists (select 1 from slices z where z.job_id = o.job_id and z.model = o.model
                                    and z.state = 'leased' and z.lost_count between 1 and :search_max)
                                or (select 1 from slices r where r.job_id = o.job_id and r.model = o.model and r.state = 'ready'
                                    and r.lost_count = 0 order by r.first limit 1 offset :kept) is not null) order by s.first limit 1) is not null
        order by o.due_at, o.job_id
        limit :due_max
    ) m) end as due
from (
    select w.model,
        replace(cast(:models as text), cast(:between as text) || w.model || cast(:behind as text), '') <> cast(:models as text) as is_wanted
    from awake w where w.model is not null limit :models_max
) a;

-- outlook_job --
-- What stands before each model of a job: its own rest, what its flow has that is older, what is out, and its weight.
select m.model, m.work_units, m.item_count, m.done_count, m.share_owner, m.state, coalesce(f.weight_milli, 1000) as weight_milli,
    cast(coalesce((select sum(ahead.units) from (
        select o.work_units - o.work_units * o.done_count / o.item_count as units from job_models o
        where o.model = m.model and o.share_owner = m.share_owner and o.state = 'open'
            and (o.created_at < m.created_at or (o.created_at = m.created_at and o.job_id < m.job_id))
        order by o.created_at, o.job_id
        limit :jobs_max
    ) ahead), 0) as bigint) as ahead_units,
    cast(coalesce((select sum(s.work_units) from slices s
        where s.job_id = m.job_id and s.model = m.model and s.state = 'leased'), 0) as bigint) as in_flight_units
from job_models m
left join flows f on f.model = m.model and f.share_owner = m.share_owner
where m.job_id = :job_id
order by m.model;
